//! How fast these threads can read main memory: the limit of decoding, which reads all weights for every token.

use crate::commands::machine::{self, Memory};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Passes over the buffer, of which the fastest counts.
const PASSES: usize = 5;
/// The buffer is so many times as large as the largest cache.
const CACHES: u64 = 8;
const LEAST: u64 = 256 << 20;
const MOST: u64 = 1 << 30;
/// Share of the free memory that the buffer may take.
const FREE_SHARE: u64 = 8;

/// Bytes a second that threads read together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    pub bytes_per_second: f64,
    pub buffer_bytes: u64,
    pub threads: usize,
}

impl Bandwidth {
    /// Reads a buffer well above the caches. `None` if there is hardly any memory left.
    pub fn measure(threads: usize) -> Option<Bandwidth> {
        let wanted = machine::last_level_cache().unwrap_or(0).saturating_mul(CACHES).clamp(LEAST, MOST);
        let bytes = Memory::detect().map_or(LEAST, |memory| wanted.min(memory.available / FREE_SHARE));
        let words = usize::try_from(bytes / 8).ok()? / threads.max(1);
        (words > 0).then(|| Self::over(threads.max(1), words))
    }

    /// `words` of 8 bytes for each thread, which writes them itself, so that they lie near its core.
    fn over(threads: usize, words: usize) -> Bandwidth {
        let barrier = Barrier::new(threads);
        let work = |id: usize| {
            let data = vec![id as u64 | 1; words];
            let mut best = f64::INFINITY;
            for _ in 0..PASSES {
                barrier.wait();
                let begin = Instant::now();
                black_box(black_box(data.as_slice()).iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
                barrier.wait();
                best = best.min(begin.elapsed().as_secs_f64());
            }
            best
        };
        let seconds = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|id| scope.spawn(move || work(id))).collect();
            let own = work(0);
            // The slowest thread's view: all have read everything by then.
            others.into_iter().filter_map(|thread| thread.join().ok()).fold(own, f64::max)
        });
        let buffer_bytes = words as u64 * 8 * threads as u64;
        Bandwidth { bytes_per_second: buffer_bytes as f64 / seconds.max(1e-9), buffer_bytes, threads }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_buffer_is_read() {
        let got = Bandwidth::over(3, 1 << 16);
        assert_eq!((got.threads, got.buffer_bytes), (3, 3 << 19));
        // No computer reads at less than 10 MB/s or more than 100 TB/s.
        assert!((1e7..1e14).contains(&got.bytes_per_second), "{got:?}");
    }
}
