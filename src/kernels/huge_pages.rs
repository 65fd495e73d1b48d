//! Moving mapped weights to huge pages while a model runs.
//!
//! Decoding reads all weights for every token, and in pages of 4 KB it has to find a new page every 64 cache lines.
//! File pages stay small on Linux, so pieces of 2 MB are copied to anonymous huge pages and put in the place of the
//! file's pages ([`mremap`](https://man7.org/linux/man-pages/man2/mremap.2.html)): addresses and contents stay as they are,
//! and who reads at that moment waits for the kernel. A piece costs half a millisecond, or some where a virtual machine has to
//! get the memory first, so it is done now and then between tokens, and a model starts as fast as before.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Size and alignment of a huge page.
const HUGE: usize = 2 << 20;

/// How far the move has come.
#[derive(Debug)]
pub struct HugePages {
    /// Address of the next piece.
    next: AtomicUsize,
    end: usize,
}

impl HugePages {
    /// For the mapping `map`, of which nothing is moved yet. Where the system has no huge pages of this size, nothing will be.
    pub fn new(map: &memmap2::Mmap) -> Self {
        let Range { start, end } = map.as_ptr_range();
        let end = if offered(Path::new("/sys/kernel/mm/transparent_hugepage")) { end } else { start };
        HugePages { next: AtomicUsize::new((start as usize).next_multiple_of(HUGE)), end: end as usize }
    }

    /// Moves the next piece of `map`, the mapping it was made for. False when nothing is left, or the system refuses.
    pub fn advance(&self, map: &memmap2::Mmap) -> bool {
        let piece = self.next.fetch_add(HUGE, Ordering::Relaxed);
        let inside = piece.checked_add(HUGE).is_some_and(|end| end <= self.end);
        let Some(offset) = piece.checked_sub(map.as_ptr() as usize).filter(|_| inside) else {
            self.stop();
            return false;
        };
        let moved = move_piece(&map[offset..offset + HUGE]);
        if !moved {
            self.stop();
        }
        moved
    }

    fn stop(&self) {
        self.next.store(self.end, Ordering::Relaxed);
    }
}

/// Whether the settings of Linux in `folder` give huge pages of our size to those who ask.
fn offered(folder: &Path) -> bool {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let enabled = read("enabled");
    (enabled.contains("[always]") || enabled.contains("[madvise]")) && read("hpage_pmd_size").trim().parse() == Ok(HUGE)
}

/// Puts a copy of `piece`, a huge page's worth of a mapping, in its place.
#[cfg(target_os = "linux")]
fn move_piece(piece: &[u8]) -> bool {
    use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
    use rustix::mm::{madvise, mmap_anonymous, mprotect, mremap_fixed, munmap};
    use std::ffi::c_void;
    let place = piece.as_ptr().cast_mut().cast::<c_void>();
    // SAFETY: `room` is nobody else's. What is put in the place of `piece` has the same bytes, and the kernel holds back
    // those who read it meanwhile. The piece is whole pages of a mapping, which is unmapped as a range of addresses.
    unsafe {
        let room = mmap_anonymous(std::ptr::null_mut(), 2 * HUGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let Ok(room) = room else { return false };
        let skipped = (room as usize).next_multiple_of(HUGE) - room as usize;
        let copy = room.byte_add(skipped);
        let moved = madvise(copy, HUGE, Advice::LinuxHugepage).is_ok() && {
            std::ptr::copy_nonoverlapping(piece.as_ptr(), copy.cast::<u8>(), HUGE);
            mprotect(copy, HUGE, MprotectFlags::READ).is_ok()
                && mremap_fixed(copy, HUGE, HUGE, MremapFlags::MAYMOVE, place).is_ok()
        };
        let gone = if moved { HUGE } else { 0 };
        // What is left of the room; an empty range is refused, which does no harm.
        let _ = munmap(room, skipped);
        let _ = munmap(copy.byte_add(gone), 2 * HUGE - skipped - gone);
        moved
    }
}

#[cfg(not(target_os = "linux"))]
fn move_piece(_: &[u8]) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Bytes stay the same, for threads that read them all the time too, and the file is not touched.
    #[test]
    fn contents_stay_while_pages_move() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let bytes: Vec<u8> = (0..5 * HUGE + 12345).map(|i| ((i * 2_654_435_761) >> 7) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let map = unsafe { memmap2::Mmap::map(&std::fs::File::open(&path).unwrap()).unwrap() };
        let pages = HugePages::new(&map);
        let done = AtomicBool::new(false);
        let moved = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        assert!(map[..] == bytes[..]);
                    }
                });
            }
            let moved = (0..100).take_while(|_| pages.advance(&map)).count();
            done.store(true, Ordering::Relaxed);
            moved
        });
        if cfg!(target_os = "linux") && offered(Path::new("/sys/kernel/mm/transparent_hugepage")) {
            assert!((4..=5).contains(&moved), "{moved}");
        }
        assert!(!pages.advance(&map));
        assert!(map[..] == bytes[..]);
        drop(map);
        assert!(std::fs::read(&path).unwrap() == bytes);
    }

    #[test]
    fn settings_are_respected() {
        let dir = tempfile::tempdir().unwrap();
        let with = |enabled: &str, size: &str| {
            std::fs::write(dir.path().join("enabled"), enabled).unwrap();
            std::fs::write(dir.path().join("hpage_pmd_size"), size).unwrap();
            offered(dir.path())
        };
        assert!(!offered(dir.path()));
        assert!(with("always [madvise] never\n", "2097152\n"));
        assert!(with("[always] madvise never\n", "2097152\n"));
        assert!(!with("always madvise [never]\n", "2097152\n"));
        // Pages of 64 KB, as some AArch64 systems have them.
        assert!(!with("always [madvise] never\n", "536870912\n"));
    }
}
