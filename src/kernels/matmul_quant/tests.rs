//! Products of every level, format and shape against slowly decoded weights, and their speed.

use super::*;
use crate::kernels::rotate::Rotate;
use crate::quant::blocks::{Block, pack_tile};
use crate::quant::book;
use crate::quant::decode::rotated_group;
use crate::quant::encode::encode_tile;
use crate::quant::format::{HEADER, SCALE_BASE};
use crate::quant::trellis;
use crate::quant::{Format, Rotation};

const FORMATS: [Format; 15] = [
    Format::Cq1,
    Format::Cq2,
    Format::Cq3,
    Format::Cq4,
    Format::Cq8,
    Format::Tcq1,
    Format::Tcq2,
    Format::Tcq3,
    Format::Tcq4,
    Format::Q4_0,
    Format::Q8_0,
    Format::Bcq1,
    Format::Bcq2,
    Format::Bcq3,
    Format::Bcq4,
];

fn tensor(layout: &CqLayout) -> Vec<u8> {
    match layout.code {
        Code::Scalar => scalar_tensor(layout),
        Code::Trellis => trellis_tensor(layout),
        Code::Block => block_tensor(layout, |i| half::f16::from_f32((i % 201) as f32 * 1e-3 - 0.1)),
        Code::Book => book_tensor(layout),
    }
}

/// All codes there are, with the largest levels among them, and runs of the largest alone.
fn book_tensor(layout: &CqLayout) -> Vec<u8> {
    let (padded, groups, count) = (layout.padded_cols(), layout.groups(), 1 << layout.bits);
    let level = |i: usize| [-127, 93, -38, 5][i / (count / 4).max(1) % 4] + (i % (count / 4).max(1)) as i8;
    let levels = std::array::from_fn(|i| level(i % count));
    let book = Book { levels, unit: 0.01, factors: (0..padded).map(|k| (k % 7) as f32 * 0.25 - 0.6).collect() };
    let code = |i: usize| if (i / 128).is_multiple_of(5) { 0 } else { (i * 37 + i * i / 11) % count };
    let codes: Vec<u8> = (0..layout.rows * padded).map(|i| code(i) as u8).collect();
    let scales: Vec<half::f16> = (0..layout.rows * groups).map(|i| half::f16::from_f32((i % 201) as f32 * 1e-3 - 0.1)).collect();
    let mut data = book.header(layout);
    for (codes, scales) in codes.chunks(TILE_ROWS * padded).zip(scales.chunks(TILE_ROWS * groups)) {
        let mut tile = vec![0; layout.tile_bytes()];
        book::pack_tile(layout, codes, scales, &mut tile);
        data.extend(tile);
    }
    data
}

/// Blocks with all levels there are, those of the smallest alone among them.
fn block_tensor(layout: &CqLayout, scale: impl Fn(usize) -> half::f16) -> Vec<u8> {
    let count = 1 << layout.bits;
    let level =
        |i: usize, k: usize| (if i.is_multiple_of(5) { 0 } else { (i * 37 + k * 89 + k * k) % count }) as i32 - count as i32 / 2;
    let block = |i| Block { scale: scale(i), levels: std::array::from_fn(|k| level(i, k) as i8) };
    let blocks: Vec<Block> = (0..layout.rows * layout.groups()).map(block).collect();
    let mut data = vec![0; layout.bytes().unwrap()];
    for (blocks, out) in blocks.chunks(TILE_ROWS * layout.groups()).zip(data.chunks_exact_mut(layout.tile_bytes())) {
        pack_tile(layout, blocks, out);
    }
    data
}

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
        let odd = if format.code() == Code::Block { 288 } else { 264 };
        for (rows, cols) in [(1, 128), (64, 96), (130, 576), (200, odd)] {
            let layout = CqLayout::new(format, rows, cols).unwrap();
            let data = tensor(&layout);
            let most = 11;
            let x: Vec<f32> = (0..most * cols).map(|i| ((i * 31 % 257) as f32 - 128.0) / 40.0).collect();
            let (padded, groups) = (layout.padded_cols(), layout.groups());
            let (mut codes, mut scales, mut sums) = (vec![0i8; most * padded], vec![0.0; most * groups], vec![0; most * groups]);
            let own = layout.rotation() == Rotation::Own;
            let factors: Vec<f32> = if own { Book::factors(&layout, &data).collect() } else { Vec::new() };
            Rotate::select(Level::Scalar).rows(&pool, &layout, &factors, &x, &mut codes, &mut scales, &mut sums);
            let bias: Vec<f32> = (0..rows).map(|r| r as f32 * 0.01).collect();
            let mut truth = vec![0.0f64; most * rows];
            let mut group = [0.0f32; GROUP];
            for row in 0..rows {
                for g in 0..groups {
                    let group = &mut group[..layout.group_width(g)];
                    rotated_group(&layout, &data, row, g, group);
                    for token in 0..most {
                        let x = &codes[token * padded + g * layout.group()..][..group.len()];
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
                    // Columns around those of the matrix stay as they are.
                    let stride = rows + 5;
                    let mut wide = vec![7.5; tokens * stride];
                    let mut scratch = vec![0; 2 * MatMulQuant::panel_bytes(&layout)];
                    let x = Rotated {
                        codes: &codes[first * padded..][..tokens * padded],
                        scales: &scales[first * groups..][..tokens * groups],
                        sums: &sums[first * groups..][..tokens * groups],
                    };
                    let out = Columns { values: &mut wide, first: 3, stride };
                    kernel.run(&pool, &layout, &data, x, Some(&bias), out, &mut scratch);
                    assert!(wide.chunks_exact(stride).all(|row| row[..3] == [7.5; 3] && row[3 + rows..] == [7.5; 2]));
                    wide.chunks_exact(stride).flat_map(|row| row[3..3 + rows].to_vec()).collect::<Vec<f32>>()
                };
                let alone: Vec<f32> = (0..most).flat_map(|token| run(token, 1)).collect();
                for (o, t) in alone.iter().zip(&truth) {
                    assert!((f64::from(*o) - t).abs() < 1e-5 * size, "{level} {format} {rows}x{cols}: {o} {t}");
                }
                for tokens in 2..=most {
                    let together = run(0, tokens);
                    assert_eq!(together, alone[..tokens * rows], "{level} {format}: a token depends on its neighbours");
                }
            }
        }
    }
}

/// Where no sum has to be rounded (scales are powers of two), every level gives the same bits: those of integer
/// arithmetic. Activations are at the ends of their range as well, where 16-bit sums come closest to overflow.
#[test]
fn blocks_are_exact_at_every_level() {
    let pool = Pool::new(2);
    for format in [Format::Q4_0, Format::Q8_0] {
        let (rows, cols, tokens) = (70, 160, 9);
        let layout = CqLayout::new(format, rows, cols).unwrap();
        let data = block_tensor(&layout, |i| half::f16::from_f32([0.25, -0.5, 1.0, -2.0][i % 4]));
        let codes: Vec<i8> =
            (0..tokens * cols).map(|i| if i / 32 % 3 == 0 { -127 } else { ((i * 71 % 255) as i32 - 127) as i8 }).collect();
        let scales = vec![0.5; tokens * layout.groups()];
        let sums: Vec<i32> = codes.chunks_exact(32).map(|x| x.iter().map(|x| i32::from(*x)).sum()).collect();
        let mut truth = vec![0.0f32; tokens * rows];
        let mut group = [0.0f32; 32];
        for (row, g) in (0..rows).flat_map(|row| (0..layout.groups()).map(move |g| (row, g))) {
            rotated_group(&layout, &data, row, g, &mut group);
            for token in 0..tokens {
                let x = &codes[token * cols + 32 * g..][..32];
                truth[token * rows + row] += 0.5 * group.iter().zip(x).map(|(w, x)| w * f32::from(*x)).sum::<f32>();
            }
        }
        for level in Level::supported() {
            let kernel = MatMulQuant::select(level);
            let mut scratch = vec![0; 2 * MatMulQuant::panel_bytes(&layout)];
            let mut out = vec![f32::NAN; tokens * rows];
            kernel.run(
                &pool,
                &layout,
                &data,
                Rotated { codes: &codes, scales: &scales, sums: &sums },
                None,
                Columns::all(&mut out, rows),
                &mut scratch,
            );
            assert_eq!(out, truth, "{level} {format}");
            for (token, truth) in truth.chunks_exact(rows).enumerate() {
                let (codes, at) = (&codes[token * cols..][..cols], token * layout.groups());
                let x = Rotated { codes, scales: &scales[at..][..layout.groups()], sums: &sums[at..][..layout.groups()] };
                let mut out = vec![f32::NAN; rows];
                kernel.run(&pool, &layout, &data, x, None, Columns::all(&mut out, layout.rows), &mut scratch);
                assert_eq!(out, truth, "{level} {format}, token {token}");
            }
        }
    }
}

/// Prints weights a second and core of one token (all weights in the second-level cache) and of many tokens, and what
/// a few tokens cost against one:
/// `cargo test --release --lib -- --ignored --nocapture speed_of_products`.
#[test]
#[ignore = "a measurement"]
fn speed_of_products() {
    const COUNTS: [usize; 8] = [1, 64, 2, 3, 4, 5, 6, 8];
    let pool = Pool::new(1);
    let (rows, cols) = (512, 2048);
    let tensors = FORMATS.map(|format| {
        let layout = CqLayout::new(format, rows, cols).unwrap();
        (layout, tensor(&layout))
    });
    for level in Level::supported() {
        let kernel = MatMulQuant::select(level);
        let mut best = [[f64::MAX; COUNTS.len()]; FORMATS.len()];
        // In turn and many times, because other programs run too.
        for _ in 0..if level == Level::Scalar { 3 } else { 40 } {
            for ((layout, data), best) in tensors.iter().zip(&mut best) {
                for (best, tokens) in best.iter_mut().zip(COUNTS) {
                    let (codes, scales) = (vec![1i8; tokens * cols], vec![0.01; tokens * layout.groups()]);
                    let sums = vec![128; tokens * layout.groups()];
                    let x = Rotated { codes: &codes, scales: &scales, sums: &sums };
                    let mut out = vec![0.0; tokens * rows];
                    let mut scratch = vec![0; MatMulQuant::panel_bytes(layout)];
                    for _ in 0..if tokens < 64 { 10 } else { 1 } {
                        let start = std::time::Instant::now();
                        kernel.run(&pool, layout, data, x, None, Columns::all(&mut out, layout.rows), &mut scratch);
                        *best = best.min(start.elapsed().as_secs_f64());
                    }
                }
            }
        }
        let cq4 = best[3][0];
        for (format, best) in FORMATS.into_iter().zip(best) {
            let speed = |seconds: f64, tokens: f64| tokens * (rows * cols) as f64 / seconds * 1e-9;
            println!(
                "{level:>12} {format}: one token {:6.2} Gweights/s ({:.2} of cq4), 64 tokens {:7.2}, {:?} tokens {:.2?} times one",
                speed(best[0], 1.0),
                cq4 / best[0],
                speed(best[1], 64.0),
                &COUNTS[2..],
                best[2..].iter().map(|few| few / best[0]).collect::<Vec<f64>>(),
            );
        }
    }
}
