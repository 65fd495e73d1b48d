//! The sample files decode to what the reference decoded them to, and damaged files are refused.

use super::*;
use crate::error::Kind;
use crate::quant::decode::decode_row;
use crate::quant::{Code, CqLayout, blocks, book};
use std::path::{Path, PathBuf};

const SAMPLES: [&str; 16] = [
    "cq1_hadamard_i4",
    "cq1_hadamard_rowmajor",
    "cq2_hadamard_i4_k200",
    "cq2_hadamard_rowmajor",
    "cq3_hadamard_i4",
    "cq3_hadamard_rowmajor",
    "cq4_hadamard_i4",
    "cq4_hadamard_rowmajor",
    "cq4_orthogonal_i4",
    "cq4_orthogonal_rowmajor",
    "fp16_1d",
    "fp16_2d",
    "int8_1d",
    "int8_2d_interleaved",
    "int8_depthwise",
    "int8_pointwise",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/official").join(name)
}

/// A little-endian f32 array in numpy's format, version 1.
fn npy(path: &Path) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..7], b"\x93NUMPY\x01");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..end]).unwrap();
    assert!(header.contains("'<f4'") && header.contains("'fortran_order': False"), "{header}");
    let shape = header.split_once("'shape': (").unwrap().1.split_once(')').unwrap().0;
    let shape = shape.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    (shape, bytes[end..].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn rows_and_width(shape: &[usize]) -> (usize, usize) {
    let rows = if shape.len() == 1 { 1 } else { shape[0] };
    (rows, shape.iter().product::<usize>() / rows)
}

#[test]
fn samples_decode_to_the_reference() {
    for name in SAMPLES {
        let file = WeightsFile::open(&fixture(&format!("{name}.weights"))).unwrap();
        let (shape, expected) = npy(&fixture(&format!("{name}.expected.npy")));
        assert_eq!(file.shape(), shape, "{name}");
        let (rows, width) = rows_and_width(&shape);
        let largest = expected.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        let tolerance = if name.starts_with("cq") { 1e-6 * largest } else { 0.0 };
        // All at once, and from a row in the middle on.
        for range in [0..rows, rows / 2..rows, rows - 1..rows] {
            let mut values = vec![0.0; range.len() * width];
            file.read_rows(range.clone(), &mut values).unwrap();
            let wrong = values.iter().zip(&expected[range.start * width..]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(wrong <= tolerance, "{name} {range:?}: {wrong} of {largest}");
        }
    }
}

/// What a lossless import takes is there, and the values follow from it by the definition.
#[test]
fn the_parts_of_a_cq_matrix_give_its_values() {
    for name in ["cq3_hadamard_i4", "cq2_hadamard_rowmajor", "cq4_orthogonal_i4"] {
        let WeightsFile::Cq(m) = WeightsFile::open(&fixture(&format!("{name}.weights"))).unwrap() else { panic!("{name}") };
        let (_, expected) = npy(&fixture(&format!("{name}.expected.npy")));
        let (row, n, groups) = (m.rows - 1, m.group_size, m.groups());
        let (mut codes, mut norms) = (vec![0; m.cols], vec![0.0; groups]);
        m.read_codes(row..m.rows, &mut codes).unwrap();
        m.read_norms(row..m.rows, &mut norms).unwrap();
        assert!(codes.iter().all(|c| usize::from(*c) < m.codebook.len()) && m.codebook.len() == 1 << m.bits);
        let entry = |i: usize, j: usize| match &m.rotation {
            Rotation::Hadamard { left, right, permutation } => {
                let p = permutation[j] as usize;
                let sign = if (i & p).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                f64::from(left[i]) * sign * f64::from(right[p]) / (n as f64).sqrt()
            }
            Rotation::Orthogonal(matrix) => half::f16::from_bits(matrix[i * n + j]).to_f64(),
        };
        for (k, expected) in expected[row * m.cols..].iter().enumerate() {
            let (g, i) = (k / n, k % n);
            let u: f64 = (0..n).map(|j| entry(i, j) * f64::from(m.codebook[usize::from(codes[g * n + j])])).sum();
            let w = u * f64::from(norms[g]) / f64::from(m.input_scale[k]);
            assert!((w - f64::from(*expected)).abs() < 1e-5, "{name} {k}: {w} {expected}");
        }
    }
}

/// What a bundle keeps of the samples decodes to their values: codes but for integer levels, integers to the bit.
#[test]
fn kept_samples_have_their_values() {
    let mut counts = [0; 2];
    for name in SAMPLES {
        let file = WeightsFile::open(&fixture(&format!("{name}.weights"))).unwrap();
        let (shape, expected) = npy(&fixture(&format!("{name}.expected.npy")));
        let (rows, width) = rows_and_width(&shape);
        let tensor = Tensor { undo: Undo::NOTHING, width, stored_width: width, file };
        let (layout, header, tile) = match tensor.kept() {
            Err(why) => {
                assert!(name.contains("orthogonal") && why.contains("orthogonal") || name == "int8_depthwise", "{name}: {why}");
                continue;
            }
            Ok(Kept::Floats) => {
                assert!(name.starts_with("fp16"));
                continue;
            }
            Ok(Kept::Blocks(format)) => {
                let layout = CqLayout::new(format, rows, width).unwrap();
                let mut tile = vec![0; layout.tile_bytes()];
                blocks::pack_tile(&layout, &tensor.read_blocks(0..rows).unwrap(), &mut tile);
                counts[0] += 1;
                (layout, Vec::new(), tile)
            }
            Ok(Kept::Codes(format, book)) => {
                let layout = CqLayout::new(format, rows, width).unwrap();
                let mut tile = vec![0; layout.tile_bytes()];
                let (codes, scales) = tensor.read_codes(0..rows).unwrap();
                book::pack_tile(&layout, &codes, &scales, &mut tile);
                counts[1] += 1;
                (layout, book.header(&layout), tile)
            }
        };
        let data = [header, tile].concat();
        let (mut noise, mut signal) = (0.0f64, 0.0f64);
        let mut out = vec![0.0; width];
        for (row, expected) in expected.chunks_exact(width).enumerate() {
            decode_row(&layout, &data, row, &mut out);
            for (got, expected) in out.iter().zip(expected) {
                noise += f64::from(got - expected).powi(2);
                signal += f64::from(*expected).powi(2);
            }
        }
        let error = (noise / signal).sqrt();
        println!("{name}: {error:.2e}");
        let bound = if layout.code == Code::Block { 0.0 } else { [1e-4, 6e-4, 1.8e-3, 5e-3][layout.bits - 1] };
        assert!(error <= bound, "{name}: {error:e}");
    }
    assert_eq!(counts, [3, 8]);
}

/// Opens and, if that works, decodes.
fn decode(path: &Path) -> Result<()> {
    let file = WeightsFile::open(path)?;
    let (rows, width) = rows_and_width(&file.shape());
    file.read_rows(0..rows, &mut vec![0.0; rows * width])
}

/// Cut anywhere, or with any bit of header and metadata turned: an error or other values, never a panic.
#[test]
fn damaged_files_are_refused_or_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.weights");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        decode(&path).inspect_err(|e| assert!(matches!(e.kind, Kind::BadFile | Kind::Unsupported), "{e}")).is_err()
    };
    for name in SAMPLES {
        let good = std::fs::read(fixture(&format!("{name}.weights"))).unwrap();
        for len in (0..good.len()).filter(|n| (*n < 130 && n % 7 < 2) || n % 97 == 0 || n + 3 > good.len()) {
            assert!(refused(&good[..len]), "{name} cut at {len}");
        }
        assert!(refused(&[&good[..], &[0]].concat()), "{name} and a byte");
        // Every bit of two kinds, some of the others.
        let all = ["cq3_hadamard_rowmajor", "int8_2d_interleaved"].contains(&name);
        for bit in (0..8 * good.len().min(116)).step_by(if all { 1 } else { 13 }) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            refused(&bad);
        }
        // Absurd sizes in every field.
        for (at, len) in [(8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (48, 4), (52, 8), (60, 8), (68, 4), (72, 4), (76, 8)] {
            for byte in [0, 0x7f, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at..at + len].fill(byte);
                refused(&bad);
            }
        }
    }
}

#[test]
fn impossible_rotations_and_scales_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.weights");
    let good = std::fs::read(fixture("cq4_hadamard_i4.weights")).unwrap();
    // 16 codebook values, 256 input scales and as many reciprocals, 8 * 2 norms, signs, permutation; at 96.
    let (scales, norms) = (96 + 32, 96 + 32 + 4 * 256);
    let (left, permutation) = (norms + 32, norms + 32 + 256);
    let error = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&path, bad).unwrap();
        decode(&path).unwrap_err().to_string()
    };
    assert!(error(left, &[0]).ends_with("a sign of the rotation is 0"));
    assert!(error(left + 200, &[0x80]).ends_with("a sign of the rotation is -128"));
    assert!(error(permutation, &128u32.to_le_bytes()).contains("128 twice or out of range"));
    let second = [good[permutation + 4], good[permutation + 5], good[permutation + 6], good[permutation + 7]];
    assert!(error(permutation, &second).contains("twice"));
    assert!(error(scales, &[0, 0]).ends_with("the input scale holds 0"));
    assert!(error(scales, &[0, 0xfc]).ends_with("the input scale holds -inf"));
    assert!(error(96, &[0, 0x7e]).contains("the codebook holds"));
    assert!(error(4, &32u32.to_le_bytes()).contains("unknown flags 0x20"));
    assert!(error(48, &7u32.to_le_bytes()).contains("unknown precision 7"));
    assert!(error(72, &1u32.to_le_bytes()).contains("1 groups of 128 are not 256 columns"));
    assert!(error(0, b"GGUF").ends_with("is no .weights file"));
}

/// A file by hand: 4 rows of 32 columns, a run is 8 columns of the four rows, the first half in the low nibbles.
#[test]
fn old_four_bit_integers() {
    let mut bytes = vec![0u8; 96];
    bytes[..4].copy_from_slice(b"CACT");
    let mut put = |at: usize, value: u64, len: usize| bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
    for (at, value, len) in [(4, 9, 4), (8, 32, 4), (12, 2, 4), (16, 4, 8), (24, 32, 8), (48, 3, 4), (52, 64, 8), (60, 8, 8)] {
        put(at, value, len);
    }
    for (at, value, len) in [(68, 32, 4), (72, 1, 4), (76, 3, 8)] {
        put(at, value, len);
    }
    let scale = |v: f32| half::f16::from_f32(v).to_le_bytes();
    bytes.extend([scale(1.0), scale(2.0), scale(0.5), scale(9.0)].concat());
    bytes.resize(128, 0);
    let mut data = [0u8; 64];
    data[1] = 0x7f; // value 1 of run 0: row 0, column 1: -1; value 17: row 0, column 5: 7
    data[16 + 4] = 0x80; // value 4 of run 1: row 1, column 8: 0; value 20: row 1, column 12: -8
    data[48 + 15] = 0x13; // run 3: value 15 is row 3, column 27; value 31 row 3, column 31
    bytes.extend(data);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.weights");
    std::fs::write(&path, bytes).unwrap();
    let file = WeightsFile::open(&path).unwrap();
    assert_eq!(file.shape(), [3, 32]);
    let mut values = vec![0.0; 96];
    file.read_rows(0..3, &mut values).unwrap();
    let set: Vec<(usize, f32)> = values.iter().copied().enumerate().filter(|(_, v)| *v != 0.0).collect();
    assert_eq!(set, [(1, -1.0), (5, 7.0), (32 + 12, -16.0)]);
}
