//! Many answers at once are what each would be alone.

use crate::golden::Golden;
use crate::support::bundle;
use cactus::engine::sampler::Sampling;
use cactus::engine::schedule::{Counters, Job, Listener, Scheduler};
use cactus::engine::service::{Refused, Service};
use cactus::engine::thinking::{Part, Splitter};
use cactus::engine::writing::TokenChoices;
use cactus::engine::{Answer, Engine, Finish, LoadOptions, Request, generate};
use cactus::error::Result;
use cactus::graph::CacheFormat;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tempfile::TempDir;

fn engine(bundle: &Path, cache: CacheFormat) -> Engine {
    let options = LoadOptions { threads: Some(2), context: Some(250), cache: Some(cache), ..Default::default() };
    Engine::load(bundle, &options).expect("a sound bundle")
}

type Outcome = (usize, Result<Answer>, String, Vec<TokenChoices>);

/// Sends what it hears when it is over.
struct Ear {
    number: usize,
    text: String,
    choices: Vec<TokenChoices>,
    end: Sender<Outcome>,
    gone: Arc<AtomicBool>,
}

impl Listener for Ear {
    fn part(&mut self, part: Part, choices: &mut Vec<TokenChoices>) {
        if let Part::Thought(text) | Part::Answer(text) = part {
            self.text += text;
        }
        self.choices.append(choices);
    }
    fn done(&mut self, outcome: Result<Answer>, mut choices: Vec<TokenChoices>) {
        self.choices.append(&mut choices);
        let heard = (self.number, outcome, std::mem::take(&mut self.text), std::mem::take(&mut self.choices));
        let _ = self.end.send(heard);
    }
    fn gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

fn job(number: usize, prompt: &[u32], request: &Request, end: &Sender<Outcome>) -> (Job, Arc<AtomicBool>) {
    let gone = Arc::new(AtomicBool::new(false));
    let ear = Ear { number, text: String::new(), choices: Vec::new(), end: end.clone(), gone: gone.clone() };
    let splitter = Splitter::new(None, false);
    (Job { prompt: prompt.to_vec(), request: request.clone(), splitter, listener: Box::new(ear) }, gone)
}

/// Prompts with a long beginning in common, with a short one, and with none; of one token, and longer than a step.
fn prompts(ids: &[u32]) -> Vec<(Vec<u32>, Request)> {
    let shared: Vec<u32> = ids.iter().cycle().take(100).copied().collect();
    (0..14)
        .map(|i| {
            let mut prompt = shared[..[100, 100, 100, 20, 0, 99, 50][i % 7]].to_vec();
            prompt.extend(ids.iter().rev().cycle().skip(i).take([1, 5, 40, 130, 3][i % 5]));
            let sampling = Sampling { temperature: [0.0, 0.8][i % 2], seed: i as u64, ..Default::default() };
            let request =
                Request { sampling, max_tokens: 10 + 7 * i, draft: i % 3 == 0, top_logprobs: Some(2), ..Request::default() };
            (prompt, request)
        })
        .collect()
}

#[test]
fn answers_at_once_are_those_given_alone() {
    let dir = TempDir::new().expect("a folder");
    for (model, bits, cache) in [
        ("llama-tied", 4, CacheFormat::Int8),
        ("gemma3-text", 3, CacheFormat::Int8),
        ("qwen3", 16, CacheFormat::F16),
        ("phi3", 2, CacheFormat::F16),
    ] {
        let (golden, path) = (Golden::read(model), dir.path().join(model));
        bundle(&golden.folder, &path, bits);
        let engine = engine(&path, cache);
        let jobs = prompts(&golden.ids);
        let alone: Vec<Answer> = jobs
            .iter()
            .map(|(prompt, request)| generate(&mut engine.session(), prompt, request, &mut |_| {}, &|| false).expect("an answer"))
            .collect();
        for slots in [1, 3, 8] {
            let counters = Counters::default();
            let mut scheduler = Scheduler::new(&engine, slots, &counters).expect("a plan");
            let (sender, receiver) = channel();
            for (i, (prompt, request)) in jobs.iter().enumerate() {
                scheduler.submit(job(i, prompt, request, &sender).0);
                // Some come while others are being written.
                (0..i % 4).for_each(|_| scheduler.step());
            }
            while !scheduler.is_idle() {
                scheduler.step();
            }
            drop(sender);
            let mut heard = 0;
            for (i, outcome, text, choices) in receiver {
                let (answer, expected) = (outcome.expect("an answer"), &alone[i]);
                assert_eq!(answer.ids, expected.ids, "{model}, {slots} slots, prompt {i}");
                assert_eq!(answer.logprobs, expected.logprobs, "{model}, {slots} slots, prompt {i}");
                assert_eq!((&answer.text, answer.finish), (&expected.text, expected.finish));
                assert_eq!(text, expected.text, "pieces are the whole");
                assert_eq!(choices.iter().map(|c| c.id).collect::<Vec<_>>(), expected.ids);
                assert!(choices.iter().all(|c| c.top.len() == 2 && c.top[0].1 >= c.top[1].1 && c.logprob <= c.top[0].1));
                heard += 1;
            }
            assert_eq!(heard, jobs.len());
            let known = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            let total: usize = jobs.iter().map(|(prompt, _)| prompt.len()).sum();
            assert_eq!((known(&counters.prompt_tokens) + known(&counters.reused_tokens)) as usize, total, "{model} {slots}");
        }
    }
}

/// A beginning that all share is run once, also when all come at the same moment.
#[test]
fn what_prompts_share_is_read_once() {
    let dir = TempDir::new().expect("a folder");
    let (golden, path) = (Golden::read("llama-tied"), dir.path().join("model"));
    bundle(&golden.folder, &path, 4);
    let engine = engine(&path, CacheFormat::Int8);
    let counters = Counters::default();
    let mut scheduler = Scheduler::new(&engine, 4, &counters).expect("a plan");
    let (sender, _receiver) = channel();
    let request = Request { max_tokens: 8, ..Request::default() };
    for i in 0..16 {
        let mut prompt: Vec<u32> = golden.ids.iter().cycle().take(200).copied().collect();
        prompt.extend([5 + i, 6, 7]);
        scheduler.submit(job(i as usize, &prompt, &request, &sender).0);
    }
    while !scheduler.is_idle() {
        scheduler.step();
    }
    assert_eq!(counters.prompt_tokens.load(Ordering::Relaxed), 200 + 16 * 3);
    assert_eq!(counters.ended.load(Ordering::Relaxed), 16);
}

/// User report P34: work for callers that have gone away ends at once, whether it waits, reads or writes.
#[test]
fn p34_nothing_is_written_for_nobody() {
    let dir = TempDir::new().expect("a folder");
    let (golden, path) = (Golden::read("llama-tied"), dir.path().join("model"));
    bundle(&golden.folder, &path, 4);
    let engine = engine(&path, CacheFormat::Int8);
    let counters = Counters::default();
    let mut scheduler = Scheduler::new(&engine, 1, &counters).expect("a plan");
    let (sender, receiver) = channel();
    let request = Request { max_tokens: 40, ignore_end: true, ..Request::default() };
    let jobs: Vec<_> = (0..3).map(|i| job(i, &golden.ids, &request, &sender)).collect();
    let gone: Vec<_> = jobs.into_iter().map(|(job, gone)| (scheduler.submit(job), gone).1).collect();
    (0..5).for_each(|_| scheduler.step());
    gone[0].store(true, Ordering::Relaxed);
    gone[1].store(true, Ordering::Relaxed);
    while !scheduler.is_idle() {
        scheduler.step();
    }
    drop(sender);
    let ended: Vec<usize> = receiver.iter().map(|(i, outcome, ..)| (outcome.expect("an answer"), i).1).collect();
    assert_eq!(ended, [2]);
    assert_eq!((counters.left.load(Ordering::Relaxed), counters.begun.load(Ordering::Relaxed)), (2, 2));
}

#[test]
fn a_service_refuses_what_it_cannot_hold_and_ends_what_it_took() {
    let dir = TempDir::new().expect("a folder");
    let (golden, path) = (Golden::read("llama-tied"), dir.path().join("model"));
    bundle(&golden.folder, &path, 4);
    let service = Service::start(Arc::new(engine(&path, CacheFormat::Int8)), 2, 3).expect("a service");
    let (sender, receiver) = channel();
    let request = Request { max_tokens: 200, ignore_end: true, ..Request::default() };
    let one = |i: usize| vec![job(i, &golden.ids, &request, &sender).0];
    let results: Vec<_> = (0..8).map(|i| service.submit(one(i))).collect();
    assert!(results[..5].iter().all(Result::is_ok) && results.contains(&Err(Refused::Full)), "{results:?}");
    let taken = results.iter().filter(|r| r.is_ok()).count();
    let wrong = job(99, &[u32::MAX], &request, &sender).0;
    while service.open() >= 5 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(service.submit(vec![wrong]), Ok(()));
    service.close();
    let heard: Vec<Result<Answer>> = receiver.try_iter().map(|(_, outcome, ..)| outcome).collect();
    assert_eq!(heard.len(), taken + 1);
    assert_eq!(heard.iter().filter(|outcome| outcome.is_err()).count(), 1);
    assert!(heard.iter().flatten().all(|answer| answer.ids.len() == 200 && answer.finish == Finish::Length));
    assert_eq!(service.submit(one(0)), Err(Refused::Closed));
    assert_eq!(service.open(), 0);
}
