//! An engine on a thread of its own, for callers on many others.

use super::load::Engine;
use super::schedule::{Counters, Job, Scheduler};
use crate::error::Result;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often an idle thread looks whether it is to end.
const GLANCE: Duration = Duration::from_millis(100);

/// Takes jobs from any thread; see [`super::schedule`].
pub struct Service {
    engine: Arc<Engine>,
    counters: Arc<Counters>,
    jobs: Mutex<Sender<Job>>,
    /// Jobs that were taken and have not ended.
    open: Arc<AtomicUsize>,
    most: usize,
    closing: Arc<AtomicBool>,
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
    inner: Box<dyn super::schedule::Listener>,
    open: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl super::schedule::Listener for Counted {
    fn part(&mut self, part: super::thinking::Part, choices: &mut Vec<super::writing::TokenChoices>) {
        self.inner.part(part, choices);
    }
    fn done(&mut self, outcome: Result<super::generate::Answer>, choices: Vec<super::writing::TokenChoices>) {
        self.inner.done(outcome, choices);
    }
    fn gone(&self) -> bool {
        self.inner.gone()
    }
}

impl Service {
    /// Writes up to `slots` answers at a time; up to `queue` more jobs wait.
    pub fn start(engine: Arc<Engine>, slots: usize, queue: usize) -> Result<Self> {
        let (sender, receiver) = channel();
        let counters = Arc::new(Counters::default());
        let closing = Arc::new(AtomicBool::new(false));
        // What cannot be planned is told here, not on the thread.
        Scheduler::new(&engine, slots, &counters)?;
        let thread = {
            let (engine, counters, closing) = (engine.clone(), counters.clone(), closing.clone());
            let work = move || {
                if let Ok(mut scheduler) = Scheduler::new(&engine, slots, &counters) {
                    serve(&mut scheduler, &receiver, &closing);
                }
            };
            std::thread::Builder::new().name("engine".to_owned()).spawn(work)
        };
        let thread =
            thread.map_err(|e| crate::error::Error::new(crate::error::Kind::Io, format!("cannot start a thread: {e}")))?;
        Ok(Service {
            engine,
            counters,
            jobs: Mutex::new(sender),
            open: Arc::default(),
            most: slots.max(1) + queue,
            closing,
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
        if self.closing.load(Ordering::Acquire) {
            return Err(Refused::Closed);
        }
        let count = jobs.len();
        let room = |open: usize| (open + count <= self.most).then_some(open + count);
        // More than ever fit at once may come when there is nothing else.
        let alone = |open: usize| (open == 0).then_some(count);
        let taken = self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, |open| room(open).or_else(|| alone(open)));
        taken.map_err(|_| Refused::Full)?;
        let sender = self.jobs.lock().unwrap_or_else(|e| e.into_inner());
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
        self.closing.store(true, Ordering::Release);
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

fn serve(scheduler: &mut Scheduler, jobs: &Receiver<Job>, closing: &AtomicBool) {
    loop {
        while let Ok(job) = jobs.try_recv() {
            scheduler.submit(job);
        }
        if !scheduler.is_idle() {
            scheduler.step();
            continue;
        }
        match jobs.recv_timeout(GLANCE) {
            Ok(job) => scheduler.submit(job),
            Err(RecvTimeoutError::Timeout) if !closing.load(Ordering::Acquire) => {}
            Err(_) => return,
        }
    }
}
