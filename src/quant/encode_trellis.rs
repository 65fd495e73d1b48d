//! Rounding bands of rows to a trellis format.

use super::encode::{Product, SquareError};
use super::feedback::Feedback;
use super::format::{BLOCK_COLS, CqLayout, GROUP, HEADER, SCALE_BASE, TILE_ROWS};
use super::pack::{Codes, pack_trellis};
use super::trellis::{SEQUENCES, STEPS, ScaleCode, TABLE, book, parities};

/// Tiles that are searched together: their sequences fill the sixteen lanes of a search.
pub const BAND_TILES: usize = LANES / SEQUENCES;
/// Rows of a band.
pub const BAND_ROWS: usize = BAND_TILES * TILE_ROWS;
const LANES: usize = 16;
/// Values of a search: [`STEPS`] steps of sixteen lanes.
pub const VALUES: usize = STEPS * LANES;
/// A choice of the search: the index of the level in the low six bits, the coded bit in the highest.
pub const CODED: u8 = 0x80;
/// How far above the root mean square of the weights a scale may need to be: targets grow by feedback.
const HEADROOM: f32 = 4.0;

/// Times that scales are fitted to what was rounded, and the group rounded again.
const REFITS: usize = 1;

/// Finds the trellis codes nearest to `targets [STEPS, 16]` in units of `scales`; handed in because the fast
/// search lives elsewhere. Arguments: bits, levels, targets, scales, choices.
pub type Search<'a> = &'a (dyn Fn(usize, &[i8; TABLE], &[f32; VALUES], &[f32; VALUES], &mut [u8; VALUES]) + Sync);

/// The fast parts of an encoder.
#[derive(Clone, Copy)]
pub struct Tools<'a> {
    pub product: Product<'a>,
    pub search: Search<'a>,
}

/// What all tiles of a trellis tensor share.
#[derive(Clone, Debug)]
pub struct Header {
    pub table: [i8; TABLE],
    /// Standard deviation of the weights in units of levels, for unit scale.
    pub unit: f32,
    pub scales: ScaleCode,
}

impl Header {
    /// For weights of which no group of a row has a root mean square above `largest`.
    pub fn new(layout: &CqLayout, largest: f32) -> Self {
        let book = book(layout.bits);
        Header { table: book.levels, unit: book.unit, scales: ScaleCode::for_largest(largest / book.unit * HEADROOM) }
    }

    /// As stored before the first tile.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        for (o, level) in out.iter_mut().zip(self.table) {
            *o = level as u8;
        }
        out[SCALE_BASE..SCALE_BASE + 4].copy_from_slice(&self.scales.base.to_le_bytes());
        out
    }
}

/// Largest root mean square of a group in any of the rows.
pub fn largest_rms(layout: &CqLayout, rows: &[f32]) -> f32 {
    let mut largest = 0.0f32;
    for row in rows.chunks_exact(layout.cols) {
        for (group, x) in row.chunks(GROUP).enumerate() {
            largest = largest.max(x.iter().map(|x| x * x).sum::<f32>() / layout.group_width(group) as f32);
        }
    }
    largest.sqrt()
}

/// One band being encoded.
struct Band<'a> {
    layout: &'a CqLayout,
    header: &'a Header,
    /// Rotated values to come close to in the sense of the feedback, `[rows, padded]`.
    aims: &'a [f32],
    /// The same with what earlier columns left over.
    targets: Vec<f32>,
    count: usize,
}

/// Encodes up to [`BAND_ROWS`] rows. `weights` and `aims` are rotated, `[rows, padded_cols]`: aims are what is
/// encoded (the weights, or what makes up for errors of earlier layers), the reported error is against the
/// weights. `out` is as many tiles as the rows need; rows that are missing in the last one get scale zero.
pub fn encode_band(
    layout: &CqLayout,
    header: &Header,
    weights: &[f32],
    aims: &[f32],
    feedback: Option<&Feedback>,
    tools: Tools,
    out: &mut [u8],
) -> SquareError {
    let padded = layout.padded_cols();
    let count = weights.len() / padded;
    assert!(weights.len() == count * padded && aims.len() == weights.len() && count <= BAND_ROWS);
    assert_eq!(out.len(), count.div_ceil(TILE_ROWS) * layout.tile_bytes());
    let mut band = Band { layout, header, aims, targets: aims.to_vec(), count };
    let mut error = SquareError::default();
    for group in 0..layout.groups() {
        let width = layout.group_width(group);
        let before = band.group_targets(group);
        let mut scale_codes = band.scales(group);
        let value = |codes: &[u8]| -> Vec<f32> { codes.iter().map(|q| header.scales.value(*q)).collect() };
        let mut scales = value(&scale_codes);
        let (mut levels, mut codes) = band.round_group(group, &scales, feedback, tools);
        for _ in 0..REFITS {
            // Targets have grown by what the group's own columns left over: fit scales to them.
            scale_codes = band.fitted_scales(group, &levels);
            scales = value(&scale_codes);
            band.set_group_targets(group, &before);
            (levels, codes) = band.round_group(group, &scales, feedback, tools);
        }
        if let Some(feedback) = feedback {
            band.feed_later(group, &levels, &scales, feedback, tools.product);
        }
        for (tile, out) in out.chunks_exact_mut(layout.tile_bytes()).enumerate() {
            for (block, codes) in codes.iter().enumerate() {
                let at = layout.group_offset(group) + block * layout.block_bytes();
                pack_trellis(&codes[tile], layout.bits, &mut out[at..at + layout.block_bytes()]);
            }
            let stored = &scale_codes[tile * TILE_ROWS..count.min((tile + 1) * TILE_ROWS)];
            let at = layout.scale_offset(group);
            out[at..at + TILE_ROWS].fill(0);
            out[at..at + stored.len()].copy_from_slice(stored);
        }
        let filled = width.min(layout.cols - group * GROUP);
        for r in 0..count {
            let w = &weights[r * padded + group * GROUP..][..width];
            let mut difference = [0.0f32; GROUP];
            for ((d, w), level) in difference.iter_mut().zip(w).zip(&levels[r * width..]) {
                *d = w - f32::from(*level) * scales[r];
            }
            error += SquareError::of_group(w, &mut difference[..width], filled);
        }
    }
    error
}

impl Band<'_> {
    /// Scale codes of the rows for a group, from the targets as they are now.
    fn scales(&self, group: usize) -> Vec<u8> {
        let (padded, width) = (self.layout.padded_cols(), self.layout.group_width(group));
        let row = |r: usize| {
            let x = &self.targets[r * padded + group * GROUP..][..width];
            let rms = (x.iter().map(|x| x * x).sum::<f32>() / width as f32).sqrt();
            self.header.scales.code(rms / self.header.unit)
        };
        (0..self.count).map(row).collect()
    }

    /// The scales that fit the levels of a group best to the targets that they were chosen for.
    fn fitted_scales(&self, group: usize, levels: &[i8]) -> Vec<u8> {
        let (padded, width) = (self.layout.padded_cols(), self.layout.group_width(group));
        let row = |r: usize| {
            let targets = &self.targets[r * padded + group * GROUP..][..width];
            let (mut product, mut square) = (0.0f32, 0.0f32);
            for (t, level) in targets.iter().zip(&levels[r * width..]) {
                product += t * f32::from(*level);
                square += f32::from(*level).powi(2);
            }
            self.header.scales.code((product / square.max(1.0)).max(0.0))
        };
        (0..self.count).map(row).collect()
    }

    fn group_targets(&self, group: usize) -> Vec<f32> {
        let (padded, width) = (self.layout.padded_cols(), self.layout.group_width(group));
        self.targets.chunks_exact(padded).flat_map(|t| &t[group * GROUP..][..width]).copied().collect()
    }

    fn set_group_targets(&mut self, group: usize, values: &[f32]) {
        let (padded, width) = (self.layout.padded_cols(), self.layout.group_width(group));
        for (t, v) in self.targets.chunks_exact_mut(padded).zip(values.chunks_exact(width)) {
            t[group * GROUP..][..width].copy_from_slice(v);
        }
    }

    /// Levels `[rows, width]` of a group, and the codes of each column block by tile.
    fn round_group(
        &mut self,
        group: usize,
        scales: &[f32],
        feedback: Option<&Feedback>,
        tools: Tools,
    ) -> (Vec<i8>, Vec<[Codes; BAND_TILES]>) {
        let (padded, width) = (self.layout.padded_cols(), self.layout.group_width(group));
        let parities = parities(self.layout.bits);
        let mut levels = vec![0i8; self.count * width];
        let mut all = Vec::with_capacity(width / BLOCK_COLS);
        let (mut x, mut s, mut choices) = ([0.0f32; VALUES], [0.0f32; VALUES], [0u8; VALUES]);
        // Row and column of each value of a search; rows that do not exist stay zero.
        let place = |value: usize| {
            let (step, lane) = (value / LANES, value % LANES);
            let byte = lane % SEQUENCES * (STEPS / 8) + step / 8;
            (lane / SEQUENCES * TILE_ROWS + step % 8 * 8 + byte / BLOCK_COLS, byte % BLOCK_COLS)
        };
        let places: Vec<(usize, usize)> = (0..VALUES).map(place).collect();
        for (value, (row, _)) in places.iter().enumerate() {
            s[value] = scales.get(*row).copied().unwrap_or(0.0);
        }
        for first in (0..width).step_by(BLOCK_COLS) {
            let column = group * GROUP + first;
            for (x, (row, k)) in x.iter_mut().zip(&places) {
                *x = if *row < self.count { self.targets[row * padded + column + k] } else { 0.0 };
            }
            (tools.search)(self.layout.bits, &self.header.table, &x, &s, &mut choices);
            let mut codes: [Codes; BAND_TILES] = [[[0; BLOCK_COLS]; TILE_ROWS]; BAND_TILES];
            let mut errors = vec![[0.0f32; BLOCK_COLS]; self.count];
            for (choice, (row, k)) in choices.iter().zip(&places) {
                let index = choice & !CODED;
                codes[row / TILE_ROWS][row % TILE_ROWS][*k] = choice >> 7 | (index >> parities) << 1;
                if *row < self.count {
                    let level = self.header.table[index as usize];
                    levels[row * width + first + k] = level;
                    errors[*row][*k] = self.aims[row * padded + column + k] - f32::from(level) * scales[*row];
                }
            }
            all.push(codes);
            let Some(feedback) = feedback else { continue };
            let inner = &feedback.groups[group].inner;
            let next = first + BLOCK_COLS;
            for (r, errors) in errors.iter().enumerate() {
                let later = &mut self.targets[r * padded + group * GROUP + next..][..width - next];
                for (k, e) in errors.iter().enumerate() {
                    let u = &inner[(first + k) * width + next..(first + k + 1) * width];
                    later.iter_mut().zip(u).for_each(|(t, u)| *t += e * u);
                }
            }
        }
        (levels, all)
    }

    /// Passes the errors of a finished group on to the later groups of its span.
    fn feed_later(&mut self, group: usize, levels: &[i8], scales: &[f32], feedback: &Feedback, product: Product) {
        let (padded, width) = (self.layout.padded_cols(), self.layout.group_width(group));
        let outer = &feedback.groups[group].outer;
        let later = outer.len() / width;
        if later == 0 {
            return;
        }
        let mut errors = vec![0.0f32; self.count * width];
        for (i, e) in errors.iter_mut().enumerate() {
            let (r, c) = (i / width, i % width);
            *e = self.aims[r * padded + group * GROUP + c] - f32::from(levels[i]) * scales[r];
        }
        let mut sums = vec![0.0f32; self.count * later];
        product(outer, &errors, later, &mut sums);
        for (t, sums) in self.targets.chunks_exact_mut(padded).zip(sums.chunks_exact(later)) {
            for (t, s) in t[group * GROUP + width..].iter_mut().zip(sums) {
                *t += s;
            }
        }
    }
}
