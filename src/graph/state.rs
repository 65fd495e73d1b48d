//! What a forward pass leaves behind for the next one: keys and values of every attention layer.

use super::build::Graph;
use crate::kernels::attention::{AttentionShape, BLOCK, Cache};

/// Keys and values of a sequence, one cache a layer. Memory is reserved for `capacity` positions but only
/// touched as positions are filled.
pub struct State {
    layers: Vec<Layer>,
    capacity: usize,
    len: usize,
}

struct Layer {
    shape: AttentionShape,
    keys: Vec<u16>,
    values: Vec<u16>,
}

impl Graph {
    /// An empty state for up to `positions` positions.
    pub fn state(&self, positions: usize) -> State {
        let capacity = positions.max(1).next_multiple_of(BLOCK);
        let layer = |shape: &AttentionShape| Layer {
            shape: *shape,
            keys: vec![0; shape.key_elements(capacity)],
            values: vec![0; shape.value_elements(capacity)],
        };
        State { layers: self.caches.iter().map(layer).collect(), capacity, len: 0 }
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

    /// Bytes a position takes over all layers.
    pub fn bytes_per_position(&self) -> usize {
        let elements = |l: &Layer| (l.keys.len() + l.values.len()) / self.capacity;
        self.layers.iter().map(elements).sum::<usize>() * size_of::<u16>()
    }

    pub(super) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Stores keys and values of new positions, which follow the filled ones.
    pub(super) fn store(&mut self, cache: usize, x: &[f32], stride: usize) {
        let (start, capacity, layer) = (self.len, self.capacity, &mut self.layers[cache]);
        let key_column = layer.shape.heads * layer.shape.head_dim;
        let value_column = key_column + layer.shape.kv_heads * layer.shape.head_dim;
        let (keys, values) = (&mut layer.keys, &mut layer.values);
        crate::kernels::attention::store(&layer.shape, x, stride, key_column, value_column, start, keys, values, capacity);
    }

    pub(super) fn cache(&self, cache: usize) -> Cache<'_> {
        Cache { keys: &self.layers[cache].keys, values: &self.layers[cache].values, capacity: self.capacity }
    }
}
