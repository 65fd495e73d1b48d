//! What a session remembers in a file, so that another process need not read the same text again.
//!
//! File: magic, key, number of ids (u64), ids (u32), keys and values ([`State::write`](crate::graph::State::write)),
//! CRC-32 of all that; little-endian. The key tells the weights, the program, its kernels and the form of the cache, since
//! what was read once must be what would be read again.

use super::load::Engine;
use super::own_file;
use super::session::Session;
use crate::error::{Error, Result};
use flate2::{CrcReader, CrcWriter};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

const MAGIC: [u8; 16] = *b"cactus-prompt-01";

/// What [`Session::restore`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// There is no file yet.
    Nothing,
    /// So many tokens need not be run again if a prompt begins with them.
    Tokens(usize),
    /// The file is another model's, of another version, CPU level or cache format.
    Foreign,
    /// The file is not whole.
    Damaged,
}

fn key(engine: &Engine) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(engine.bundle.identity());
    hash.update(format!("{} {} {}", env!("CARGO_PKG_VERSION"), engine.level(), engine.cache_format()));
    hash.finalize().into()
}

impl Session<'_> {
    /// Writes everything that the session holds to a file, which is replaced at once.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        let key = key(self.engine());
        let (ids, state) = self.memory();
        own_file::replace(path, |file| {
            let mut out = CrcWriter::new(BufWriter::with_capacity(1 << 20, file));
            out.write_all(&MAGIC)?;
            out.write_all(&key)?;
            out.write_all(&(ids.len() as u64).to_le_bytes())?;
            ids.iter().try_for_each(|id| out.write_all(&id.to_le_bytes()))?;
            state.write(&mut out)?;
            let sum = out.crc().sum();
            out.write_all(&sum.to_le_bytes())?;
            out.flush()
        })
    }

    /// Takes over what [`save`](Self::save) wrote, as far as it fits the context; the session holds nothing else then.
    ///
    /// # Errors
    /// When the file cannot be read, or is something else, which had better not be replaced.
    pub fn restore(&mut self, path: &Path) -> Result<Restored> {
        let failed = |e: &io::Error| Error::io("read", path, e);
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Restored::Nothing),
            file => file.map_err(|e| failed(&e))?,
        };
        let size = file.metadata().map_err(|e| failed(&e))?.len();
        let mut file = CrcReader::new(BufReader::with_capacity(1 << 20, file));
        let mut magic = [0; MAGIC.len()];
        if file.read_exact(&mut magic).is_err() || magic != MAGIC {
            return Err(Error::bad_file(path, "not a prompt cache").with_hint("give the name of a new file"));
        }
        self.truncate(0);
        let (mut found, mut len) = ([0; 32], [0; 8]);
        if file.read_exact(&mut found).and_then(|()| file.read_exact(&mut len)).is_err() {
            return Ok(Restored::Damaged);
        }
        if found != key(self.engine()) {
            return Ok(Restored::Foreign);
        }
        let start = (MAGIC.len() + found.len() + len.len()) as u64;
        Ok(self.take_over(u64::from_le_bytes(len), size.saturating_sub(start), &mut file).unwrap_or_else(|| {
            self.truncate(0);
            Restored::Damaged
        }))
    }

    /// Reads `count` ids and their state from the `size` bytes that are left; `None` if they are not right.
    fn take_over(&mut self, count: u64, size: u64, file: &mut CrcReader<impl Read>) -> Option<Restored> {
        let count = usize::try_from(count).ok().filter(|count| *count as u64 <= size / 4)?;
        let (context, vocab) = (self.engine().context(), self.engine().vocab());
        let (ids, state) = self.memory();
        if 4 * count as u64 + state.written_bytes(count) + 4 != size {
            return None;
        }
        for i in 0..count {
            let mut id = [0; 4];
            file.read_exact(&mut id).ok()?;
            let id = u32::from_le_bytes(id);
            if id as usize >= vocab {
                return None;
            }
            if i < context {
                ids.push(id);
            }
        }
        state.read(count, file).ok()?;
        state.truncate(context);
        let expected = file.crc().sum();
        let mut sum = [0; 4];
        file.read_exact(&mut sum).ok()?;
        (u32::from_le_bytes(sum) == expected).then_some(Restored::Tokens(ids.len()))
    }
}
