//! What a forward pass leaves behind for the next one: keys and values of every attention layer.

use super::build::Graph;
use crate::kernels::Pool;
use crate::kernels::attention::{self, Attention, AttentionShape, BLOCK};
use crate::kernels::attention_int8::{self, AttentionInt8};
use std::fmt;
use std::io::{self, Read, Write};

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheFormat {
    #[default]
    F16,
    /// Half the memory, and faster; see [`attention_int8`].
    Int8,
}

impl CacheFormat {
    /// Bytes of the keys and values of one position of a layer.
    pub fn position_bytes(self, shape: &AttentionShape) -> usize {
        match self {
            CacheFormat::F16 => 2 * (shape.key_elements(1) + shape.value_elements(1)),
            CacheFormat::Int8 => {
                let sizes = attention_int8::sizes(shape, 1);
                sizes.keys + sizes.values + 4 * (sizes.key_scales + sizes.value_scales)
            }
        }
    }
}

impl fmt::Display for CacheFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CacheFormat::F16 => "f16",
            CacheFormat::Int8 => "int8",
        })
    }
}

/// Keys and values of a sequence, one cache a layer. Memory is reserved for `capacity` positions but only
/// touched as positions are filled.
pub struct State {
    layers: Vec<Layer>,
    capacity: usize,
    len: usize,
    /// For int8: what [`attention_int8::partials`] asks for.
    scratch: Vec<f32>,
}

struct Layer {
    shape: AttentionShape,
    store: Store,
}

enum Store {
    F16 { keys: Vec<u16>, values: Vec<u16> },
    Int8 { keys: Vec<i8>, key_scales: Vec<f32>, values: Vec<i8>, value_scales: Vec<f32> },
}

impl Store {
    fn format(&self) -> CacheFormat {
        match self {
            Store::F16 { .. } => CacheFormat::F16,
            Store::Int8 { .. } => CacheFormat::Int8,
        }
    }
}

impl Layer {
    /// The part of each key-value head in each array: as many bytes for every position, in blocks of [`BLOCK`].
    fn heads(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let arrays: [&mut [u8]; 4] = match &mut self.store {
            Store::F16 { keys, values } => [bytes(keys), bytes(values), &mut [], &mut []],
            Store::Int8 { keys, key_scales, values, value_scales } => {
                [bytes(keys), bytes(key_scales), bytes(values), bytes(value_scales)]
            }
        };
        let heads = self.shape.kv_heads;
        arrays.into_iter().flat_map(move |array| array.chunks_exact_mut((array.len() / heads).max(1)))
    }
}

fn bytes<T: bytemuck::Pod>(array: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(array)
}

/// Attention with the keys and values of one layer.
pub(super) struct Attend<'a> {
    /// Number of the layer among those with a cache.
    pub cache: usize,
    pub float: &'a Attention,
    pub int8: &'a AttentionInt8,
    /// Columns of a row: queries, keys, values.
    pub stride: usize,
}

impl Graph {
    /// An empty state for up to `positions` positions.
    pub fn state(&self, positions: usize, format: CacheFormat) -> State {
        let capacity = positions.max(1).next_multiple_of(BLOCK);
        let store = |shape: &AttentionShape| match format {
            CacheFormat::F16 => {
                Store::F16 { keys: vec![0; shape.key_elements(capacity)], values: vec![0; shape.value_elements(capacity)] }
            }
            CacheFormat::Int8 => {
                let sizes = attention_int8::sizes(shape, capacity);
                Store::Int8 {
                    keys: vec![0; sizes.keys],
                    key_scales: vec![0.0; sizes.key_scales],
                    values: vec![0; sizes.values],
                    value_scales: vec![0.0; sizes.value_scales],
                }
            }
        };
        let scratch = match format {
            CacheFormat::F16 => 0,
            CacheFormat::Int8 => self.caches.iter().map(|s| attention_int8::partials(s, capacity)).max().unwrap_or(0),
        };
        let layers = self.caches.iter().map(|shape| Layer { shape: *shape, store: store(shape) }).collect();
        State { layers, capacity, len: 0, scratch: vec![0.0; scratch] }
    }
}

impl State {
    /// Positions that are filled.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets everything from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes that [`write`](Self::write) writes for `len` positions.
    pub fn written_bytes(&self, len: usize) -> u64 {
        let position = |layer: &Layer| layer.store.format().position_bytes(&layer.shape);
        self.layers.iter().map(|layer| (position(layer) * len.next_multiple_of(BLOCK)) as u64).sum()
    }

    /// Writes keys and values of the filled positions: of each layer and array, head by head, whole blocks as they lie
    /// in memory.
    pub fn write(&mut self, to: &mut dyn Write) -> io::Result<()> {
        let (len, capacity) = (self.len.next_multiple_of(BLOCK), self.capacity);
        let heads = self.layers.iter_mut().flat_map(Layer::heads);
        heads.map(|head| &head[..head.len() / capacity * len]).try_for_each(|filled| to.write_all(filled))
    }

    /// Takes over what [`write`](Self::write) wrote for `len` positions of the same graph and format, as far as they fit.
    /// After an error nothing is left.
    pub fn read(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()> {
        self.len = 0;
        let (written, capacity) = (len.next_multiple_of(BLOCK), self.capacity);
        for head in self.layers.iter_mut().flat_map(Layer::heads) {
            let position = head.len() / capacity;
            let fits = position * written.min(capacity);
            from.read_exact(&mut head[..fits])?;
            io::copy(&mut from.take((position * written - fits) as u64), &mut io::sink())?;
        }
        self.len = len.min(capacity);
        Ok(())
    }

    /// Holds what `other`, a state of the same graph and format, holds for its first `len` positions, and nothing else.
    ///
    /// # Panics
    /// When `other` has fewer, or they do not fit.
    pub fn copy_beginning(&mut self, other: &mut State, len: usize) {
        assert!(len <= other.len && len <= self.capacity && self.layers.len() == other.layers.len());
        let (mine, theirs) = (self.capacity, other.capacity);
        let pairs = self.layers.iter_mut().zip(&mut other.layers).flat_map(|(to, from)| to.heads().zip(from.heads()));
        for (to, from) in pairs {
            let position = to.len() / mine;
            assert_eq!(position, from.len() / theirs);
            let filled = position * len.next_multiple_of(BLOCK);
            to[..filled].copy_from_slice(&from[..filled]);
        }
        self.len = len;
    }

    pub(super) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Stores keys and values of new positions, which follow the filled ones, and attends.
    pub(super) fn attend(&mut self, job: &Attend, pool: &Pool, x: &[f32], out: &mut [f32]) {
        let (start, capacity, stride) = (self.len, self.capacity, job.stride);
        let layer = &mut self.layers[job.cache];
        let shape = &layer.shape;
        let key_column = shape.heads * shape.head_dim;
        let value_column = key_column + shape.kv_heads * shape.head_dim;
        match &mut layer.store {
            Store::F16 { keys, values } => {
                attention::store(shape, x, stride, key_column, value_column, start, keys, values, capacity);
                job.float.run(pool, shape, x, stride, 0, start, attention::Cache { keys, values, capacity }, out);
            }
            Store::Int8 { keys, key_scales, values, value_scales } => {
                let mut cache = attention_int8::Cache { keys, key_scales, values, value_scales, capacity };
                job.int8.store(pool, shape, x, stride, key_column, value_column, start, &mut cache);
                job.int8.run(pool, shape, x, stride, 0, start, &cache, &mut self.scratch, out);
            }
        }
    }
}
