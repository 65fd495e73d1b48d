//! Products of every level, format and shape against slowly decoded weights, and their speed.

use super::*;
use crate::kernels::rotate::Rotate;
use crate::quant::Format;
use crate::quant::decode::rotated_group;
use crate::quant::encode::encode_tile;
use crate::quant::format::{HEADER, SCALE_BASE};
use crate::quant::trellis;

const FORMATS: [Format; 9] =
    [Format::Cq1, Format::Cq2, Format::Cq3, Format::Cq4, Format::Cq8, Format::Tcq1, Format::Tcq2, Format::Tcq3, Format::Tcq4];

/// Encoded weights.
fn scalar_tensor(layout: &CqLayout) -> Vec<u8> {
    let (rows, cols) = (layout.rows, layout.cols);
    let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * 0.1).collect();
    let mut data = vec![0; layout.bytes().unwrap()];
    for (t, out) in data.chunks_exact_mut(layout.tile_bytes()).enumerate() {
        encode_tile(layout, &w[t * 64 * cols..((t + 1) * 64).min(rows) * cols], None, out);
    }
    data
}

/// Random bytes, all of which are valid codes and scales, with a random table of levels.
fn trellis_tensor(layout: &CqLayout) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut data: Vec<u8> = (0..layout.bytes().unwrap()).map(|_| random()).collect();
    let levels: Vec<u8> = (0..trellis::levels(layout.bits)).map(|_| (random() % 127).wrapping_sub(63)).collect();
    for (entry, level) in data[..trellis::TABLE].iter_mut().zip(levels.iter().cycle()) {
        *entry = *level;
    }
    data[SCALE_BASE..HEADER].fill(0);
    data[SCALE_BASE..][..4].copy_from_slice(&trellis::ScaleCode::for_largest(0.05).base.to_le_bytes());
    data
}

/// Every level and width equals exact integer arithmetic over the slowly decoded codes, for any number
/// of tokens and any shape; and one token alone equals the same token among others, bit for bit.
#[test]
fn equals_the_slow_truth_at_every_level() {
    let pool = Pool::new(2);
    for format in FORMATS {
        for (rows, cols) in [(1, 128), (64, 96), (130, 576), (200, 264)] {
            let layout = CqLayout::new(format, rows, cols).unwrap();
            let data = if layout.code == Code::Scalar { scalar_tensor(&layout) } else { trellis_tensor(&layout) };
            let most = 11;
            let x: Vec<f32> = (0..most * cols).map(|i| ((i * 31 % 257) as f32 - 128.0) / 40.0).collect();
            let (padded, groups) = (layout.padded_cols(), layout.groups());
            let (mut codes, mut scales, mut sums) = (vec![0i8; most * padded], vec![0.0; most * groups], vec![0; most * groups]);
            Rotate::select(Level::Scalar).rows(&pool, &layout, &x, &mut codes, &mut scales, &mut sums);
            let bias: Vec<f32> = (0..rows).map(|r| r as f32 * 0.01).collect();
            let mut truth = vec![0.0f64; most * rows];
            let mut group = [0.0f32; GROUP];
            for row in 0..rows {
                for g in 0..groups {
                    let group = &mut group[..layout.group_width(g)];
                    rotated_group(&layout, &data, row, g, group);
                    for token in 0..most {
                        let x = &codes[token * padded + g * GROUP..][..group.len()];
                        let sum: f64 = group.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                        truth[token * rows + row] += sum * f64::from(scales[token * groups + g]);
                    }
                }
                (0..most).for_each(|t| truth[t * rows + row] += f64::from(bias[row]));
            }
            let size = truth.iter().fold(0.0f64, |m, t| m.max(t.abs()));
            for level in Level::supported() {
                let kernel = MatMulQuant::select(level);
                let run = |first: usize, tokens: usize| {
                    let mut out = vec![f32::NAN; tokens * rows];
                    let mut scratch = vec![0; 2 * MatMulQuant::panel_bytes(&layout)];
                    let x = Rotated {
                        codes: &codes[first * padded..][..tokens * padded],
                        scales: &scales[first * groups..][..tokens * groups],
                        sums: &sums[first * groups..][..tokens * groups],
                    };
                    kernel.run(&pool, &layout, &data, x, Some(&bias), &mut out, &mut scratch);
                    out
                };
                let alone: Vec<f32> = (0..most).flat_map(|token| run(token, 1)).collect();
                for (o, t) in alone.iter().zip(&truth) {
                    assert!((f64::from(*o) - t).abs() < 1e-5 * size, "{level} {format} {rows}x{cols}: {o} {t}");
                }
                for tokens in [2, 3, 8, 11] {
                    let together = run(0, tokens);
                    assert_eq!(together, alone[..tokens * rows], "{level} {format}: a token depends on its neighbours");
                }
            }
        }
    }
}

/// Prints weights a second and core of one token (all weights in the second-level cache) and of many tokens:
/// `cargo test --release --lib -- --ignored --nocapture speed_of_products`.
#[test]
#[ignore = "a measurement"]
fn speed_of_products() {
    let pool = Pool::new(1);
    let (rows, cols) = (512, 2048);
    let tensors = FORMATS.map(|format| {
        let layout = CqLayout::new(format, rows, cols).unwrap();
        (layout, if layout.code == Code::Scalar { scalar_tensor(&layout) } else { trellis_tensor(&layout) })
    });
    for level in Level::supported() {
        let kernel = MatMulQuant::select(level);
        let mut best = [[f64::MAX; 2]; FORMATS.len()];
        // In turn and many times, because other programs run too.
        for _ in 0..if level == Level::Scalar { 3 } else { 40 } {
            for ((layout, data), best) in tensors.iter().zip(&mut best) {
                for (best, tokens) in best.iter_mut().zip([1, 64]) {
                    let (codes, scales) = (vec![1i8; tokens * cols], vec![0.01; tokens * layout.groups()]);
                    let sums = vec![128; tokens * layout.groups()];
                    let x = Rotated { codes: &codes, scales: &scales, sums: &sums };
                    let mut out = vec![0.0; tokens * rows];
                    let mut scratch = vec![0; MatMulQuant::panel_bytes(layout)];
                    for _ in 0..if tokens == 1 { 10 } else { 1 } {
                        let start = std::time::Instant::now();
                        kernel.run(&pool, layout, data, x, None, &mut out, &mut scratch);
                        *best = best.min(start.elapsed().as_secs_f64());
                    }
                }
            }
        }
        let cq4 = best[3][0];
        for (format, best) in FORMATS.into_iter().zip(best) {
            let speed = |seconds: f64, tokens: f64| tokens * (rows * cols) as f64 / seconds * 1e-9;
            println!(
                "{level:>12} {format}: one token {:6.2} Gweights/s ({:.2} of cq4), 64 tokens {:7.2}",
                speed(best[0], 1.0),
                cq4 / best[0],
                speed(best[1], 64.0)
            );
        }
    }
}
