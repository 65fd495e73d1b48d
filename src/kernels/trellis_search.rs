//! The closest trellis codes for weights: a Viterbi search over sixteen sequences at once.
//!
//! Dynamic programming over the 256 states of `quant::trellis`; sequences are the lanes. A sequence is a
//! circle, so the search runs twice: once from the middle round to the middle with every state allowed, which
//! settles the state at the seam (half a sequence of memory on either side is much more than a state holds),
//! then from the seam and back to it (as in QTIP, <https://arxiv.org/abs/2406.11235>, section 3.1).

use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};
use crate::quant::encode_trellis::{CODED, VALUES};
use crate::quant::trellis::{MEMORY, STATES, STEPS, TABLE, parities, window_index};

/// f32 elements of scratch memory.
const SCRATCH: usize = 2 * STATES * LANES;

/// The parities of every window.
struct Windows([u8; 2 * STATES]);

impl Windows {
    const fn new(bits: usize) -> Self {
        let masks = crate::quant::trellis::masks(bits);
        let mut table = [0; 2 * STATES];
        let mut w = 0;
        while w < 2 * STATES {
            let mut i = 0;
            while i < parities(bits) {
                table[w] |= (((masks[i] as usize & w).count_ones() & 1) as u8) << i;
                i += 1;
            }
            w += 1;
        }
        Windows(table)
    }
}

/// One run through all steps from `first` on: the state after each step, by lane, goes to `path`.
///
/// `seam`: the state before the first and after the last step of every lane; `None`: all are allowed.
#[inline(always)]
unsafe fn pass<const BITS: usize, L: Lanes>(
    job: &Job,
    first: usize,
    seam: Option<&[u8; LANES]>,
    costs: &mut [f32; SCRATCH],
    back: &mut [[u16; STATES]; STEPS],
    path: &mut [[u8; LANES]; STEPS],
) {
    let windows = const { Windows::new(BITS) };
    let (parities, free) = (const { 1 << parities(BITS) }, 1 << (BITS - 1));
    unsafe {
        let (mut old, mut new) = costs.split_at_mut(STATES * LANES);
        for s in 0..STATES {
            for (lane, cost) in old[s * LANES..(s + 1) * LANES].iter_mut().enumerate() {
                *cost = if seam.is_none_or(|seam| usize::from(seam[lane]) == s) { 0.0 } else { 1e30 };
            }
        }
        for (i, back) in back.iter_mut().enumerate() {
            let step = (first + i) % STEPS;
            let target = L::load(job.targets.as_ptr().add(step * LANES));
            let scale = L::load(job.scales.as_ptr().add(step * LANES));
            let mut branch = [target; 16];
            for (p, branch) in branch[..parities].iter_mut().enumerate() {
                let mut least = L::splat(f32::MAX);
                for u in 0..free {
                    // Negated: `fma` adds.
                    let level = -f32::from(job.table[u * parities + p]);
                    let e = scale.fma(L::splat(level), target);
                    least = least.min(e.mul(e));
                }
                *branch = least;
            }
            for j in 0..STATES / 2 {
                let a = L::load(old.as_ptr().add(j * LANES));
                let b = L::load(old.as_ptr().add((j + STATES / 2) * LANES));
                for c in 0..2 {
                    let s = 2 * j + c;
                    let a = a.add(branch[windows.0[s] as usize]);
                    let b = b.add(branch[windows.0[s + STATES] as usize]);
                    back[s] = b.less(a);
                    a.min(b).store(new.as_mut_ptr().add(s * LANES));
                }
            }
            std::mem::swap(&mut old, &mut new);
        }
        for lane in 0..LANES {
            let mut state = match seam {
                Some(seam) => usize::from(seam[lane]),
                None => (0..STATES).min_by(|a, b| old[a * LANES + lane].total_cmp(&old[b * LANES + lane])).unwrap_or(0),
            };
            for i in (0..STEPS).rev() {
                path[(first + i) % STEPS][lane] = state as u8;
                let older = usize::from(back[i][state] >> lane & 1);
                state = (state | older << MEMORY) >> 1;
            }
        }
    }
}

/// What is searched for.
pub struct Job<'a> {
    /// Levels as in the header of a trellis tensor.
    pub table: &'a [i8; TABLE],
    /// Values to come close to, `[STEPS, 16]`.
    pub targets: &'a [f32; VALUES],
    /// What a level is multiplied with, `[STEPS, 16]`; differences count as they are, so a small scale
    /// weighs little.
    pub scales: &'a [f32; VALUES],
}

#[inline(always)]
unsafe fn search_lanes<const BITS: usize, L: Lanes>(job: &Job, out: &mut [u8; VALUES]) {
    unsafe {
        let mut costs = [0.0; SCRATCH];
        let mut back = [[0; STATES]; STEPS];
        let mut path = [[0; LANES]; STEPS];
        pass::<BITS, L>(job, STEPS / 2, None, &mut costs, &mut back, &mut path);
        let seam = path[STEPS - 1];
        pass::<BITS, L>(job, 0, Some(&seam), &mut costs, &mut back, &mut path);
        for (at, out) in out.iter_mut().enumerate() {
            let (step, lane) = (at / LANES, at % LANES);
            let (before, state) = (path[(step + STEPS - 1) % STEPS][lane], path[step][lane]);
            let coded = state & 1;
            let fixed = window_index(BITS, u16::from(before) << 1 | u16::from(coded));
            let index = |u: u8| fixed | (u << parities(BITS));
            let distance = |u: u8| (job.targets[at] - job.scales[at] * f32::from(job.table[index(u) as usize])).powi(2);
            let free = (0..1u8 << (BITS - 1)).min_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap_or(0);
            *out = index(free) | if coded == 1 { CODED } else { 0 };
        }
    }
}

macro_rules! per_bits {
    ($($name:ident $bits:literal),*) => {
        $(variants!($name = search_lanes[$bits] as fn(job: &Job, out: &mut [u8; VALUES]));)*
    };
}
per_bits!(search1 1, search2 2, search3 3, search4 4);

/// The search of one level, per bit width.
#[derive(Clone, Copy)]
pub struct TrellisSearch {
    by_bits: [search1::Run; 4],
}

impl TrellisSearch {
    pub fn select(level: Level) -> Self {
        TrellisSearch {
            by_bits: [search1::select(level), search2::select(level), search3::select(level), search4::select(level)],
        }
    }

    /// Choices `[STEPS, 16]` with the least sum of squared differences for the state that was settled on at
    /// the seam; see [`CODED`] for their form.
    pub fn run(&self, bits: usize, job: &Job, out: &mut [u8; VALUES]) {
        // SAFETY: the level was checked by `select`; arrays have their lengths in their types.
        unsafe { (self.by_bits[bits - 1])(job, out) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::trellis::book;

    fn gaussian(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
        };
        (0..count).map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos()).collect()
    }

    /// Mean squared difference of what the choices mean, coded bits read from the circle.
    fn cost(bits: usize, job: &Job, out: &[u8; VALUES]) -> f64 {
        let mut sum = 0.0;
        for lane in 0..LANES {
            let coded = |step: usize| u16::from(out[step % STEPS * LANES + lane] >> 7);
            for step in 0..STEPS {
                let window = (0..=MEMORY).fold(0, |w, j| w | coded(step + STEPS - j) << j);
                let at = step * LANES + lane;
                let index = out[at] & !CODED;
                assert_eq!(index & ((1 << parities(bits)) - 1), window_index(bits, window), "the circle does not close");
                sum += f64::from(job.targets[at] - job.scales[at] * f32::from(job.table[index as usize])).powi(2);
            }
        }
        sum / VALUES as f64
    }

    /// Distortion of a unit Gaussian as an independent simulation gave it, at every level.
    #[test]
    fn distortion_of_a_gaussian_is_the_simulated_one() {
        for (bits, expected) in [(1, 0.276), (2, 0.0735), (3, 0.0193), (4, 0.00505)] {
            for level in Level::supported() {
                let search = TrellisSearch::select(level);
                let mut sum = 0.0;
                let runs = if level == Level::best(None) { 16 } else { 2 };
                for seed in 0..runs {
                    let targets: [f32; VALUES] = gaussian(VALUES, seed + 5).try_into().unwrap();
                    let scales = [1.0 / book(bits).unit; VALUES];
                    let job = Job { table: &book(bits).levels, targets: &targets, scales: &scales };
                    let mut out = [0; VALUES];
                    search.run(bits, &job, &mut out);
                    sum += cost(bits, &job, &out);
                }
                let ratio = sum / runs as f64 / expected;
                assert!((ratio - 1.0).abs() < if runs > 2 { 0.03 } else { 0.08 }, "{level} {bits} bits: {ratio}");
            }
        }
    }

    /// A plain search with the seam fixed, one sequence, in f64: nothing better may exist for that seam.
    #[test]
    fn finds_the_optimum_for_its_seam() {
        let bits = 2;
        let targets: [f32; VALUES] = gaussian(VALUES, 77).try_into().unwrap();
        let scales: [f32; VALUES] = std::array::from_fn(|i| (1.0 + (i % 7) as f32 * 0.1) / book(bits).unit);
        let job = Job { table: &book(bits).levels, targets: &targets, scales: &scales };
        let mut out = [0; VALUES];
        TrellisSearch::select(Level::best(None)).run(bits, &job, &mut out);
        for lane in 0..LANES {
            let coded = |step: usize| usize::from(out[step * LANES + lane] >> 7);
            let seam = (0..MEMORY).fold(0, |s, j| s | coded(STEPS - 1 - j) << j);
            let mut costs = vec![f64::INFINITY; STATES];
            costs[seam] = 0.0;
            let mut found = 0.0;
            for step in 0..STEPS {
                let at = step * LANES + lane;
                let error = |i: u8| f64::from(targets[at] - scales[at] * f32::from(job.table[i as usize])).powi(2);
                found += error(out[at] & !CODED);
                let mut next = vec![f64::INFINITY; STATES];
                for (state, cost) in costs.iter().enumerate() {
                    for c in 0..2 {
                        let window = state << 1 | c;
                        let fixed = window_index(bits, window as u16);
                        let least = (0..2).map(|u| error(fixed | u << 3)).fold(f64::INFINITY, f64::min);
                        let to = window % STATES;
                        next[to] = next[to].min(cost + least);
                    }
                }
                costs = next;
            }
            assert!(found <= costs[seam] * (1.0 + 1e-5), "{found} {}", costs[seam]);
        }
    }

    /// Bands of any shape decode to the error that encoding reported, and that is the known distortion where
    /// groups are whole and sources Gaussian.
    #[test]
    fn bands_decode_to_the_reported_error() {
        use crate::quant::decode::decode_row;
        use crate::quant::encode::rotated_rows;
        use crate::quant::encode_trellis::{Header, Tools, encode_band, largest_rms};
        use crate::quant::{CqLayout, Format};
        let kernel = TrellisSearch::select(Level::best(None));
        let search = |bits: usize, table: &_, targets: &_, scales: &_, choices: &mut _| {
            kernel.run(bits, &Job { table, targets, scales }, choices);
        };
        let tools = Tools { product: &|_, _, _, _| unreachable!("nothing is fed back"), search: &search };
        for (format, expected) in [(Format::Tcq1, 0.276), (Format::Tcq2, 0.0735), (Format::Tcq3, 0.0193), (Format::Tcq4, 0.00505)]
        {
            for (rows, cols) in [(256, 256), (1, 1), (65, 104), (130, 576)] {
                let layout = CqLayout::new(format, rows, cols).unwrap();
                let mut weights: Vec<f32> = gaussian(rows * cols, 3).iter().map(|w| w * 0.02).collect();
                if rows > 100 {
                    weights[..cols].fill(0.0);
                }
                let header = Header::new(&layout, largest_rms(&layout, &weights));
                let mut data = vec![0xaa; layout.bytes().unwrap()];
                data[..layout.header_bytes()].copy_from_slice(&header.bytes());
                let rotated = rotated_rows(&layout, &weights);
                let tiles = &mut data[layout.header_bytes()..];
                let reported = encode_band(&layout, &header, &rotated, &rotated, None, tools, tiles);
                let (mut noise, mut out) = (0.0f64, vec![0.0; cols]);
                for (row, weights) in weights.chunks_exact(cols).enumerate() {
                    decode_row(&layout, &data, row, &mut out);
                    noise += out.iter().zip(weights).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
                    assert!(row > 0 || rows < 100 || out.iter().all(|x| *x == 0.0), "a row of zeros stays one");
                }
                assert!((noise - reported.noise).abs() <= 1e-3 * noise + 1e-12, "{format} {rows}x{cols}: {noise} {reported:?}");
                if cols == 256 {
                    let ratio = noise / reported.signal / expected;
                    assert!((0.93..1.02).contains(&ratio), "{format}: {ratio}");
                }
            }
        }
    }
}
