//! A small pool of threads that stay awake between the steps of a forward pass.
//!
//! A forward pass of a small model takes a few milliseconds and has hundreds of steps, so workers wait for
//! the next one by spinning, and go to sleep when none comes for about a tenth of a millisecond. Pure
//! spinning would collapse on a machine that is busy with something else.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Turns of the waiting loop before a worker sleeps, and before the caller yields its core.
const SPINS: usize = 4000;

type Job = *const (dyn Fn(usize) + Sync);

/// Keeps what one core writes often off the cache lines of the others.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Counts jobs; a worker runs the job when it sees a new number.
    epoch: Line<AtomicUsize>,
    /// Workers that have not finished the current job.
    running: Line<AtomicUsize>,
    sleeping: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    job: Mutex<Option<JobPointer>>,
    /// Tasks that are left of each thread's part, see [`Pool::each`].
    ranges: Vec<Line<AtomicU64>>,
    wake: Condvar,
}

/// A range of tasks in one number.
fn packed(start: usize, end: usize) -> u64 {
    (start as u64) << 32 | end as u64
}

/// Takes the first or the last task of a range.
fn take(range: &AtomicU64, first: bool) -> Option<usize> {
    let next = |range: u64| {
        let (start, end) = (range >> 32, range & u64::from(u32::MAX));
        (start < end).then(|| if first { (start + 1) << 32 | end } else { start << 32 | (end - 1) })
    };
    let was = range.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
    Some(if first { was >> 32 } else { (was & u64::from(u32::MAX)) - 1 } as usize)
}

#[derive(Clone, Copy)]
struct JobPointer(Job);
// SAFETY: the pointee is Sync and outlives the job, because `Pool::run` returns only when all are done.
unsafe impl Send for JobPointer {}

/// A fixed number of threads, the caller's included, that run one job at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs, so that several sessions may share a pool.
    turn: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` (at least 1), the calling thread being one of them.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            epoch: Line(AtomicUsize::new(0)),
            running: Line(AtomicUsize::new(0)),
            sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            job: Mutex::new(None),
            ranges: (0..threads.max(1)).map(|_| Line(AtomicU64::new(0))).collect(),
            wake: Condvar::new(),
        });
        let workers = (1..threads.max(1))
            .map_while(|id| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("cactus-{id}")).spawn(move || work(&shared, id)).ok()
            })
            .collect();
        Pool { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads by default: the fast cores that this process may use, see [`super::topology`].
    pub fn default_threads() -> usize {
        super::Topology::detect().threads()
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(thread)` once on every thread and returns when all are done.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        self.run_in_turn(job);
    }

    /// [`Pool::run`] for who has the turn.
    fn run_in_turn(&self, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        shared.running.0.store(self.workers.len(), Ordering::Relaxed);
        {
            let mut slot = shared.job.lock().unwrap_or_else(|e| e.into_inner());
            // SAFETY: only the lifetime is erased; workers drop the pointer before `running` reaches zero,
            // and this function does not return (or unwind) before that.
            *slot = Some(JobPointer(unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job) }));
            shared.epoch.0.fetch_add(1, Ordering::Release);
        }
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        let mut spins = 0;
        while shared.running.0.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        match mine {
            Err(panic) => resume_unwind(panic),
            Ok(()) => assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked"),
        }
    }

    /// Runs `job(thread, task)` for every task in `0..tasks`. Every thread has a range of neighbours, which it takes
    /// in order, so that what it reads is one stream; one that is done takes the last tasks of others.
    pub fn each(&self, tasks: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let threads = self.threads();
        if tasks <= 1 || threads == 1 {
            return (0..tasks).for_each(|task| job(0, task));
        }
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        let lines = &self.shared.ranges[..threads];
        for (thread, line) in lines.iter().enumerate() {
            line.0.store(packed(tasks * thread / threads, tasks * (thread + 1) / threads), Ordering::Relaxed);
        }
        self.run_in_turn(&|thread| {
            while let Some(task) = take(&lines[thread].0, true) {
                job(thread, task);
            }
            for other in (1..threads).map(|step| (thread + step) % threads) {
                while let Some(task) = take(&lines[other].0, false) {
                    job(thread, task);
                }
            }
        });
    }

    /// Runs `job(i, item, chunk)` for every item `i` and the `width` values of `out` that belong to it.
    pub fn each_chunk<T: Send>(
        &self,
        items: &mut [T],
        out: &mut [f32],
        width: usize,
        job: &(dyn Fn(usize, &mut T, &mut [f32]) + Sync),
    ) {
        let count = items.len();
        assert_eq!(out.len(), count * width);
        let (items, out) = (&Parts::new(items), &Parts::new(out));
        self.each(count, &|_, i| {
            // SAFETY: every task has an item and a chunk of its own.
            let (item, out) = unsafe { (&mut items.slice(i..i + 1)[0], out.slice(i * width..(i + 1) * width)) };
            job(i, item, out);
        });
    }

    /// Splits `0..count` into one contiguous range a thread, but none smaller than `grain`.
    pub fn ranges(&self, count: usize, grain: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
        let parts = (count / grain.max(1)).clamp(1, self.threads());
        if parts == 1 {
            return job(0..count);
        }
        self.run(&|thread| {
            if thread < parts {
                job(count * thread / parts..count * (thread + 1) / parts);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.job.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, id: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.0.load(Ordering::Acquire) == seen && !shared.stop.load(Ordering::Relaxed) {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let mut slot = shared.job.lock().unwrap_or_else(|e| e.into_inner());
            shared.sleeping.fetch_add(1, Ordering::SeqCst);
            while shared.epoch.0.load(Ordering::Acquire) == seen && !shared.stop.load(Ordering::Relaxed) {
                slot = shared.wake.wait(slot).unwrap_or_else(|e| e.into_inner());
            }
            shared.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        seen = shared.epoch.0.load(Ordering::Acquire);
        let job = *shared.job.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(JobPointer(job)) = job {
            // SAFETY: see `Pool::run`.
            if catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(id) })).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.running.0.fetch_sub(1, Ordering::Release);
    }
}

/// A mutable slice that several threads write in disjoint parts.
#[derive(Clone, Copy)]
pub struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}
// SAFETY: `slice` is unsafe and asks for disjoint ranges.
unsafe impl<T: Send> Send for Parts<'_, T> {}
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Parts { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Start of the slice, for kernels that write strided parts.
    pub fn start(&self) -> *mut T {
        self.start
    }

    /// # Safety
    /// No two live slices may overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for round in 0..200 {
                if round == 100 {
                    std::thread::sleep(std::time::Duration::from_millis(20)); // workers fall asleep
                }
                let counts: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
                pool.each(counts.len(), &|_, task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                pool.ranges(counts.len(), 3, &|range| {
                    for c in &counts[range] {
                        c.fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&|thread| assert_ne!(thread, 2))));
        assert!(caught.is_err());
        let count = AtomicUsize::new(0);
        pool.run(&|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 3);
    }
}
