//! An engine on a thread of its own, for callers on many others.

use super::generate::Answer;
use super::load::Engine;
use super::schedule::{Counters, Job, Listener, Scheduler};
use super::thinking::Part;
use super::writing::TokenChoices;
use crate::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Takes jobs from any thread; see [`super::schedule`].
pub struct Service {
    engine: Arc<Engine>,
    counters: Arc<Counters>,
    /// Nothing when no more jobs are taken.
    jobs: Mutex<Option<Sender<Job>>>,
    /// Jobs that were taken and have not ended.
    open: Arc<AtomicUsize>,
    most: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// As many wait as may.
    Full,
    /// No more are taken.
    Closed,
}

/// A listener whose job counts as open until it is dropped.
struct Counted {
    inner: Box<dyn Listener>,
    open: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Listener for Counted {
    fn part(&mut self, part: Part, choices: &mut Vec<TokenChoices>) {
        self.inner.part(part, choices);
    }
    fn done(&mut self, outcome: Result<Answer>, choices: Vec<TokenChoices>) {
        self.inner.done(outcome, choices);
    }
    fn gone(&self) -> bool {
        self.inner.gone()
    }
    fn stopped(&self) -> bool {
        self.inner.stopped()
    }
}

impl Service {
    /// Writes up to `slots` answers at a time; up to `queue` more jobs wait.
    pub fn start(engine: Arc<Engine>, slots: usize, queue: usize) -> Result<Self> {
        let (sender, receiver) = channel();
        let counters = Arc::new(Counters::default());
        let (ready, planned) = channel();
        let thread = {
            let (engine, counters) = (engine.clone(), counters.clone());
            let work = move || {
                let mut scheduler = match Scheduler::new(&engine, slots, &counters) {
                    Ok(scheduler) => scheduler,
                    Err(error) => return drop(ready.send(Err(error))),
                };
                drop(ready.send(Ok(())));
                serve(&mut scheduler, &receiver);
            };
            std::thread::Builder::new().name("engine".to_owned()).spawn(work)
        };
        let thread = thread.map_err(|e| Error::new(Kind::Io, format!("cannot start a thread: {e}")))?;
        let ended = |_| Error::new(Kind::Io, "the engine's thread ended before it was ready");
        planned.recv().map_err(ended)??;
        Ok(Service {
            engine,
            counters,
            jobs: Mutex::new(Some(sender)),
            open: Arc::default(),
            most: slots.max(1) + queue,
            thread: Mutex::new(Some(thread)),
        })
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Takes several jobs that belong together, or none of them.
    pub fn submit(&self, jobs: Vec<Job>) -> Result<(), Refused> {
        let sender = self.jobs.lock().unwrap_or_else(|e| e.into_inner());
        let sender = sender.as_ref().ok_or(Refused::Closed)?;
        let count = jobs.len();
        let room = |open: usize| (open + count <= self.most).then_some(open + count);
        // More than ever fit at once may come when there is nothing else.
        let alone = |open: usize| (open == 0).then_some(count);
        let taken = self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, |open| room(open).or_else(|| alone(open)));
        taken.map_err(|_| Refused::Full)?;
        for job in jobs {
            let listener = Box::new(Counted { inner: job.listener, open: self.open.clone() });
            sender.send(Job { listener, ..job }).map_err(|_| Refused::Closed)?;
        }
        Ok(())
    }

    /// Jobs that were taken and have not ended.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// Takes no more jobs and waits until those that were taken have ended.
    pub fn close(&self) {
        drop(self.jobs.lock().unwrap_or_else(|e| e.into_inner()).take());
        if let Some(thread) = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.close();
    }
}

fn serve(scheduler: &mut Scheduler, jobs: &Receiver<Job>) {
    loop {
        while let Ok(job) = jobs.try_recv() {
            scheduler.submit(job);
        }
        if !scheduler.is_idle() {
            scheduler.step();
            continue;
        }
        match jobs.recv() {
            Ok(job) => scheduler.submit(job),
            Err(_) => return,
        }
    }
}
