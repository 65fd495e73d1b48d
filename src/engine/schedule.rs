//! Many answers at once, "continuous batching" ([Orca](https://www.usenix.org/conference/osdi22/presentation/yu)).
//!
//! Every answer has a slot: a sequence with keys and values of its own. A step runs one token of each answer that is being
//! written and, as far as there is room, the next piece of a prompt that is being read, all in one run of the model, so
//! that weights are read once for all of them. What a prompt begins with and another slot holds already is copied from
//! there, and while another slot is about to read it, it is waited for: a beginning that many share is read once. Every
//! answer is what it would be alone.

use super::draft::{Draft, LONGEST};
use super::generate::{Answer, Finish, Request};
use super::load::Engine;
use super::thinking::{Part, Splitter};
use super::writing::{TokenChoices, Writing};
use crate::error::{Error, Result};
use crate::graph::{Batch, Buffers, Feed, Plan, Run, Sequence, State};
use crate::model::decoder::{self, Logits};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Tokens of a step at most.
const STEP: usize = 128;
/// A beginning shorter than this is read again sooner than waited for.
const WORTH_WAITING: usize = 16;

/// What a caller wants, and who is told.
pub struct Job {
    pub prompt: Vec<u32>,
    pub request: Request,
    pub splitter: Splitter,
    pub listener: Box<dyn Listener>,
}

/// Who is told about an answer.
pub trait Listener: Send {
    /// A piece of the answer, and what was chosen for it (with [`Request::top_logprobs`]).
    fn part(&mut self, part: Part, choices: &mut Vec<TokenChoices>);
    /// The end; choices that are not part of a piece (an end-of-text token) come along.
    fn done(&mut self, outcome: Result<Answer>, choices: Vec<TokenChoices>);
    /// Nobody listens any more; the answer is given up.
    fn gone(&self) -> bool;
    /// The answer is to end as it stands.
    fn stopped(&self) -> bool {
        false
    }
}

/// What has been done so far, to be read while it goes on.
#[derive(Debug, Default)]
pub struct Counters {
    /// Answers that were begun, and that came to their end.
    pub begun: AtomicU64,
    pub ended: AtomicU64,
    /// Given up because nobody listened.
    pub left: AtomicU64,
    /// Prompt tokens that were run, and that were known.
    pub prompt_tokens: AtomicU64,
    pub reused_tokens: AtomicU64,
    pub answer_tokens: AtomicU64,
    /// Runs of the model.
    pub steps: AtomicU64,
    /// Slots in use now, and jobs without one.
    pub busy: AtomicU64,
    pub waiting: AtomicU64,
}

fn count(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
}

/// A sequence and the answer that is written there.
struct Slot<'e> {
    state: State,
    /// What the state holds.
    ids: Vec<u32>,
    work: Option<Work<'e>>,
    /// When it was last given out.
    turn: u64,
}

/// An answer in progress.
struct Work<'e> {
    writing: Writing<'e>,
    prompt: Vec<u32>,
    /// The token to run next; none while the prompt is being read.
    next: Option<u32>,
    draft: Option<Draft>,
    /// Why the answer cannot go on.
    failed: Option<Error>,
    listener: Box<dyn Listener>,
}

impl Work<'_> {
    /// Takes the logits after everything that was run. True while the answer goes on.
    fn choose(&mut self, logits: &mut [f32]) -> bool {
        let Work { writing, listener, .. } = self;
        self.next = match writing.choose(logits, &mut |part, choices| listener.part(part, choices)) {
            Ok(next) => next,
            Err(error) => {
                self.failed = Some(error);
                writing.end(Finish::Stop);
                None
            }
        };
        self.next.is_some()
    }

    fn finish(self, counters: &Counters) {
        let Work { mut writing, mut listener, failed, .. } = self;
        if let Some(error) = failed {
            count(&counters.ended, 1);
            return listener.done(Err(error), Vec::new());
        }
        let choices = writing.take_choices();
        let answer = writing.finish(&mut |part, choices| listener.part(part, choices));
        count(&counters.ended, 1);
        listener.done(Ok(answer), choices);
    }
}

/// Slots of one engine and the jobs that wait for them.
pub struct Scheduler<'e> {
    engine: &'e Engine,
    plan: Plan,
    buffers: Buffers,
    check: Buffers,
    slots: Vec<Slot<'e>>,
    waiting: VecDeque<Job>,
    turns: u64,
    counters: &'e Counters,
}

impl<'e> Scheduler<'e> {
    /// For up to `slots` answers at a time.
    pub fn new(engine: &'e Engine, slots: usize, counters: &'e Counters) -> Result<Self> {
        let slots = slots.max(1);
        let spec = engine.spec();
        let graph = decoder::graph(spec, Logits::Last, &|name| engine.bundle.weight(name))?;
        let plan = Plan::for_sequences(&graph, engine.level(), STEP.max(slots), slots, engine.threads())?;
        let slot = |_| Slot {
            state: plan.state(engine.context(), engine.cache_format()),
            ids: Vec::with_capacity(engine.context()),
            work: None,
            turn: 0,
        };
        Ok(Scheduler {
            engine,
            buffers: plan.buffers(),
            check: engine.check.buffers(),
            slots: (0..slots).map(slot).collect(),
            plan,
            waiting: VecDeque::new(),
            turns: 0,
            counters,
        })
    }

    /// Takes a job; its listener is told whatever becomes of it.
    pub fn submit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.slots.iter().all(|slot| slot.work.is_none())
    }

    /// Gives up what nobody waits for, begins what there is a slot for, and runs the model once.
    pub fn step(&mut self) {
        self.sweep();
        self.admit();
        self.share();
        let busy = self.slots.iter().filter(|slot| slot.work.is_some()).count();
        self.counters.busy.store(busy as u64, Ordering::Relaxed);
        self.counters.waiting.store(self.waiting.len() as u64, Ordering::Relaxed);
        if busy == 0 {
            return;
        }
        let alone = |slot: &&mut Slot<'e>| slot.work.as_ref().is_some_and(|work| work.next.is_some() && work.draft.is_some());
        match self.slots.iter_mut().find(alone).filter(|_| busy == 1) {
            Some(slot) => slot.run_ahead(self.engine, &mut self.check),
            None => self.run(),
        }
        count(&self.counters.steps, 1);
        self.engine.decoded_once();
        self.finish();
    }

    /// Takes leave of answers that have ended.
    fn finish(&mut self) {
        for slot in &mut self.slots {
            if let Some(work) = slot.work.take_if(|work| work.writing.ended()) {
                count(&self.counters.answer_tokens, work.writing.tokens());
                work.finish(self.counters);
            }
        }
    }

    fn sweep(&mut self) {
        let before = self.waiting.len();
        self.waiting.retain(|job| !job.listener.gone());
        let mut left = before - self.waiting.len();
        for slot in &mut self.slots {
            left += usize::from(slot.work.take_if(|work| work.listener.gone()).is_some());
            if let Some(work) = slot.work.as_mut().filter(|work| work.listener.stopped()) {
                work.writing.end(Finish::Interrupted);
            }
        }
        count(&self.counters.left, left);
        self.finish();
    }

    /// Gives slots to waiting jobs, first come first served.
    fn admit(&mut self) {
        while let Some(free) = self.free_slot() {
            let Some(Job { prompt, request, splitter, mut listener }) = self.waiting.pop_front() else { return };
            let begun = self.engine.check_ids(&prompt);
            let begun = begun.and_then(|()| Writing::new(self.engine, &prompt, &request, splitter, Instant::now()));
            let writing = match begun {
                Ok(writing) if !prompt.is_empty() => writing,
                Ok(_) => {
                    listener.done(Err(Error::usage("the prompt is empty")), Vec::new());
                    continue;
                }
                Err(error) => {
                    listener.done(Err(error), Vec::new());
                    continue;
                }
            };
            count(&self.counters.begun, 1);
            self.turns += 1;
            let slot = &mut self.slots[free];
            slot.turn = self.turns;
            let known = beginning(&slot.ids, &prompt);
            slot.truncate(known);
            let draft = request.draft.then(Draft::default);
            slot.work = Some(Work { writing, prompt, next: None, draft, failed: None, listener });
            slot.note_reuse(known, self.counters);
        }
    }

    /// The slot for the next job: the one that holds most of its beginning, else the one that was not used for longest.
    fn free_slot(&self) -> Option<usize> {
        let prompt = &self.waiting.front()?.prompt;
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.work.is_none());
        let known = |slot: &Slot| match beginning(&slot.ids, prompt) {
            // All slots are as good when nothing worth keeping is shared.
            few if few < WORTH_WAITING => 0,
            known => known,
        };
        free.max_by_key(|(_, slot)| (known(slot), std::cmp::Reverse(slot.turn))).map(|(i, _)| i)
    }

    /// Copies beginnings of prompts from slots that hold them.
    fn share(&mut self) {
        for to in 0..self.slots.len() {
            let Some(work) = self.slots[to].reading() else { continue };
            let have = self.slots[to].ids.len();
            let known = |from: &Slot| beginning(&from.ids, &work.prompt);
            let others = self.slots.iter().enumerate().filter(|(from, _)| *from != to);
            let Some((from, known)) = others.map(|(from, slot)| (from, known(slot))).max_by_key(|(_, known)| *known) else {
                continue;
            };
            if known < have + WORTH_WAITING {
                continue;
            }
            let [to, from] = self.slots.get_disjoint_mut([to, from]).expect("two slots");
            to.state.copy_beginning(&mut from.state, known);
            to.ids.clear();
            to.ids.extend_from_slice(&from.ids[..known]);
            to.note_reuse(known - have, self.counters);
        }
    }

    /// Whether a slot that came earlier will soon hold more of what this one is about to read.
    fn waits(&self, slot: &Slot) -> bool {
        let Some(work) = slot.reading() else { return false };
        let earlier = self.slots.iter().filter(|other| other.turn < slot.turn);
        let shared = |other: &Slot| other.reading().map_or(0, |theirs| beginning(&theirs.prompt, &work.prompt));
        earlier.map(shared).any(|shared| shared >= slot.ids.len() + WORTH_WAITING)
    }

    /// One run of the model for all that can go on.
    fn run(&mut self) {
        // Tokens of each slot in this run: those with one first, as plans like it, then by age.
        let mut parts: Vec<(usize, Vec<u32>)> = Vec::new();
        let mut order: Vec<usize> = (0..self.slots.len()).filter(|i| self.slots[*i].work.is_some()).collect();
        order.sort_by_key(|i| self.slots[*i].turn);
        let next = |slot: &Slot| slot.work.as_ref().and_then(|work| work.next);
        parts.extend(order.iter().filter_map(|&i| Some((i, vec![next(&self.slots[i])?]))));
        let mut room = self.plan.max_tokens() - parts.len();
        for &i in &order {
            let slot = &self.slots[i];
            let Some(work) = slot.reading().filter(|_| room > 0 && !self.waits(slot)) else { continue };
            let rest = &work.prompt[slot.ids.len()..];
            let piece = &rest[..rest.len().min(room)];
            room -= piece.len();
            parts.push((i, piece.to_vec()));
        }
        parts.sort_by_key(|(_, ids)| ids.len() > 1);
        let ids: Vec<u32> = parts.iter().flat_map(|(_, ids)| ids).copied().collect();
        let mut states: Vec<Option<&mut State>> = self.slots.iter_mut().map(|slot| Some(&mut slot.state)).collect();
        let sequence = |(i, ids): &(usize, Vec<u32>)| Some(Sequence { state: states[*i].take()?, tokens: ids.len() });
        let mut sequences: Vec<Sequence> = parts.iter().filter_map(sequence).collect();
        let batch = Batch {
            weights: self.engine.bundle.bytes(),
            feed: Feed::Ids(&ids),
            sequences: &mut sequences,
            buffers: &mut self.buffers,
            pool: &self.engine.pool,
            profile: None,
        };
        self.plan.execute_batch(batch, &|| false);
        for (i, ids) in &parts {
            let slot = &mut self.slots[*i];
            if slot.reading().is_some() {
                count(&self.counters.prompt_tokens, ids.len());
            }
            slot.ids.extend_from_slice(ids);
        }
        let mut works: Vec<Option<&mut Work>> = self.slots.iter_mut().map(Slot::waiting).collect();
        let mut works: Vec<Option<&mut Work>> = parts.iter().map(|(i, _)| works[*i].take()).collect();
        let logits = self.plan.output_mut(&mut self.buffers, 0);
        self.engine.pool.each_chunk(&mut works, logits, self.engine.vocab(), &|_, work, logits| {
            if let Some(work) = work {
                work.choose(logits);
            }
        });
    }
}

impl<'e> Slot<'e> {
    /// The work, if its prompt is still being read.
    fn reading(&self) -> Option<&Work<'e>> {
        self.work.as_ref().filter(|work| work.next.is_none())
    }

    /// The work, if everything so far has been run.
    fn waiting(&mut self) -> Option<&mut Work<'e>> {
        let read = self.reading().is_none_or(|work| self.ids.len() == work.prompt.len());
        self.work.as_mut().filter(|_| read)
    }

    fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.state.truncate(len);
    }

    fn note_reuse(&mut self, more: usize, counters: &Counters) {
        count(&counters.reused_tokens, more);
        let known = self.ids.len();
        if let Some(work) = &mut self.work {
            work.writing.reused(known);
        }
    }

    /// Runs the next token and guesses of what follows it, as long as there is nobody else to run for.
    fn run_ahead(&mut self, engine: &Engine, buffers: &mut Buffers) {
        let Some(work) = &mut self.work else { return };
        let (Some(id), Some(draft)) = (work.next, &mut work.draft) else { return };
        let begin = Instant::now();
        let mut ids = [id; LONGEST + 1];
        let mut guess = Vec::new();
        let forced = work.writing.forced(&mut guess);
        if !forced {
            guess.extend_from_slice(draft.guess(work.writing.ids(), work.writing.room(), None).unwrap_or(&[]));
        }
        let guessed = guess.len();
        ids[1..=guessed].copy_from_slice(&guess);
        let run = Run {
            weights: engine.bundle.bytes(),
            feed: Feed::Ids(&ids[..=guessed]),
            state: &mut self.state,
            buffers,
            pool: &engine.pool,
            profile: None,
        };
        engine.check.execute(run);
        let seconds = begin.elapsed().as_secs_f64();
        self.ids.extend_from_slice(&ids[..=guessed]);
        let vocab = engine.vocab();
        let mut held = 0;
        while work.choose(&mut engine.check.output_mut(buffers, 0)[held * vocab..][..vocab]) {
            if held == guessed || work.next != Some(ids[held + 1]) {
                break;
            }
            work.writing.drafted();
            held += 1;
        }
        // What had to come says nothing about guesses.
        if let Some(draft) = work.draft.as_mut().filter(|_| !forced) {
            draft.learn(held, seconds, None);
        }
        let certain = work.writing.ids().len() - 1;
        self.truncate(certain.min(self.ids.len()));
    }
}

/// Tokens that a prompt begins with like `held`, as far as they help: the last one is run in any case.
fn beginning(held: &[u32], prompt: &[u32]) -> usize {
    let same = held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    same.min(prompt.len().saturating_sub(1))
}
