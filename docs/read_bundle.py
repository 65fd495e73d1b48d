#!/usr/bin/env python3
"""Reads a cactus bundle with nothing but numpy.

This is a second, independent reading of docs/bundle-format.md: it shares no code with the program, and the
numbers it finds can be held against the checkpoint that a bundle was made from.

    python3 docs/read_bundle.py BUNDLE                          list the tensors
    python3 docs/read_bundle.py BUNDLE layers.0.attn.qkv        print a corner of one tensor
    python3 docs/read_bundle.py BUNDLE layers.0.attn.qkv -o qkv.npy     write it as float32 [rows, cols]
    python3 docs/read_bundle.py BUNDLE --against CHECKPOINT     compare every tensor with a Hugging Face folder

With --against, the relative error that is measured here stands beside the one in cactus.json; the exit code
is 1 if they differ by more than one part in a thousand.
"""

import argparse
import json
import pathlib
import re
import sys

import numpy as np

GROUP = 128  # columns that share a rotation, and a scale per row
BLOCK_GROUP = 32  # columns that share a scale per row where nothing is rotated
TILE_ROWS = 64
BLOCK_COLS = 8
PLAIN = {"f32": "<f4", "f16": "<f2"}
CQ_BITS = {"cq1": 1, "cq2": 2, "cq3": 3, "cq4": 4, "cq8": 8}
TCQ_BITS = {"tcq1": 1, "tcq2": 2, "tcq3": 3, "tcq4": 4}
BLOCK_BITS = {"q4_0": 4, "q8_0": 8}
BOOK_BITS = {"bcq1": 1, "bcq2": 2, "bcq3": 3, "bcq4": 4}
FACTORS = 64  # where the factors of a book tensor begin
HEADER = 128  # bytes before the first tile of a trellis tensor


def bf16(words):
    """bfloat16 bit patterns as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


class SafeTensors:
    """A mapped safetensors file: https://github.com/huggingface/safetensors#format"""

    def __init__(self, path):
        self.bytes = np.memmap(path, mode="r", dtype=np.uint8)
        length = int(self.bytes[:8].view("<u8")[0])
        self.header = json.loads(self.bytes[8 : 8 + length].tobytes())
        self.header.pop("__metadata__", None)
        self.start = 8 + length

    def raw(self, name):
        """The bytes of a tensor."""
        begin, end = self.header[name]["data_offsets"]
        return self.bytes[self.start + begin : self.start + end]

    def float(self, name):
        """An F32, F16 or BF16 tensor as float32."""
        info = self.header[name]
        if info["dtype"] == "BF16":
            values = bf16(self.raw(name).view("<u2"))
        else:
            values = self.raw(name).view({"F32": "<f4", "F16": "<f2"}[info["dtype"]]).astype(np.float32)
        return values.reshape(info["shape"])


def group_width(cols, group):
    """Stored columns of a group: 128; a shorter last group has the next power of two, at least 16."""
    left = cols - group * GROUP
    return GROUP if left >= GROUP else max(16, 1 << (left - 1).bit_length())


def unpack(blocks, bits):
    """Codes [tiles, 64 rows, width] of the column blocks [tiles, width / 8, 64 * bits bytes] of a group."""
    tiles, count, _ = blocks.shape
    chunks = blocks.reshape(tiles, count, bits, 8, 8)  # chunk, row within its row block, column
    codes = np.empty((tiles, 8, 8, count, 8), np.uint8)  # row block, row, column block, column
    for t in range(8):  # row blocks of 8 rows
        if bits == 8:
            code = chunks[:, :, t]
        elif bits == 4:
            code = chunks[:, :, t // 2] >> (4 * (t % 2)) & 15
        elif bits == 3:
            code = (chunks[:, :, t // 4] >> (2 * (t % 4)) & 3) | (chunks[:, :, 2] >> t & 1) << 2
        elif bits == 2:
            code = chunks[:, :, t // 4] >> (2 * (t % 4)) & 3
        else:
            code = chunks[:, :, 0] >> t & 1
        codes[:, t] = code.transpose(0, 2, 1, 3)
    return codes.reshape(tiles, TILE_ROWS, count * BLOCK_COLS)


def trellis(blocks, bits):
    """Indices [tiles, 64 rows, width] of the levels of trellis-coded column blocks, shaped as for `unpack`."""
    tiles, count, _ = blocks.shape
    chunks = blocks.reshape(tiles, count, bits, 64)
    # Circles of 128 coded bits: four in a block, bit s % 8 of byte s / 8 first to last.
    coded = np.unpackbits(chunks[:, :, 0].reshape(tiles, count, 4, 16), axis=3, bitorder="little").astype(np.uint16)
    window = sum(np.roll(coded, j, axis=3) << j for j in range(9))  # bit j: the coded bit j steps before
    parity = np.array([bin(w).count("1") & 1 for w in range(512)], np.uint8)
    masks = [0xF2, 0x14D, 0x170, 0x85] if bits == 1 else [0xF2, 0x14D, 0x78]
    index = sum(parity[window & mask] << i for i, mask in enumerate(masks))
    index = index.reshape(tiles, count, 8, 8, 8)  # row within its row block, column, row block
    for t in range(8):
        free = np.zeros((tiles, count, 64), np.uint8)
        if bits > 1:
            free |= chunks[:, :, 1] >> t & 1
        if bits == 3:
            free |= (chunks[:, :, 2] >> t & 1) << 1
        if bits == 4:
            free |= (chunks[:, :, 2 + t % 2] >> (t // 2 * 2) & 3) << 1
        index[:, :, :, :, t] |= free.reshape(tiles, count, 8, 8) << 3
    return index.transpose(0, 4, 2, 1, 3).reshape(tiles, TILE_ROWS, count * BLOCK_COLS)


def hadamard(n):
    """The Sylvester matrix of order n (a power of two): entry (i, j) is -1 to the number of ones in i AND j."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def decode_cq(data, rows, cols, bits, levels, signs, base=None):
    """The float32 matrix [rows, padded cols] of a CQ tensor; `levels` is None for 8 bits: codes are levels there.

    `base` is given for trellis codes: the bits that scale bytes are added to."""
    groups = -(-cols // GROUP)
    tiles = -(-rows // TILE_ROWS)
    block_bytes = 64 * bits
    data = data.reshape(tiles, -1)
    parts = []
    at = 0
    for group in range(groups):
        width = group_width(cols, group)
        size = width // BLOCK_COLS * block_bytes
        blocks = data[:, at : at + size].reshape(tiles, width // BLOCK_COLS, block_bytes)
        if base is None:
            scales = bf16(np.ascontiguousarray(data[:, at + size : at + size + 2 * TILE_ROWS]).view("<u2"))
            codes = unpack(blocks, bits)
            at += size + 2 * TILE_ROWS
        else:
            q = data[:, at + size : at + size + TILE_ROWS].astype(np.uint32)
            scales = np.where(q > 0, (base + (q << 19)).view(np.float32), np.float32(0))
            codes = trellis(blocks, bits)
            at += size + TILE_ROWS
        y = (codes.view(np.int8) if levels is None else levels[codes]).astype(np.float32) * scales[:, :, None]
        # The stored values are y = H D w / sqrt(n). H is symmetric and H H = n, so w = D H y / sqrt(n).
        parts.append(y.reshape(-1, width) @ hadamard(width) * (signs[:width] / np.sqrt(np.float32(width))))
    if at != data.shape[1]:
        raise ValueError(f"a tile has {data.shape[1]} bytes, {at} were read")
    return np.concatenate(parts, axis=1)[:rows]


def decode_blocks(data, rows, cols, bits):
    """The float32 matrix [rows, cols] of a block tensor: integer levels times float16 scales."""
    tiles, groups = -(-rows // TILE_ROWS), cols // BLOCK_GROUP
    count, size = BLOCK_GROUP // BLOCK_COLS, BLOCK_GROUP // BLOCK_COLS * 64 * bits
    data = data.reshape(tiles * groups, size + 2 * TILE_ROWS)  # groups follow one another, all of one size
    codes = unpack(data[:, :size].reshape(tiles * groups, count, 64 * bits), bits)
    levels = codes.view(np.int8).astype(np.float32) - (8 if bits == 4 else 0)
    scales = np.ascontiguousarray(data[:, size:]).view("<f2").astype(np.float32)
    values = (levels * scales[:, :, None]).reshape(tiles, groups, TILE_ROWS, BLOCK_GROUP)
    return values.transpose(0, 2, 1, 3).reshape(tiles * TILE_ROWS, cols)[:rows]


def decode_book(data, rows, cols, bits):
    """The float32 matrix [rows, cols] of a book tensor: levels, unit and factors stand before the first tile."""
    groups, tiles = -(-cols // GROUP), -(-rows // TILE_ROWS)
    levels = data[:16].view(np.int8).astype(np.float32)
    unit = data[16:20].view("<f4")[0]
    start = FACTORS + 4 * groups * GROUP
    factors = data[FACTORS:start].view("<f4").reshape(groups, GROUP)
    count, size = GROUP // BLOCK_COLS, GROUP // BLOCK_COLS * 64 * bits
    data = data[start:].reshape(tiles * groups, size + 2 * TILE_ROWS)
    codes = unpack(data[:, :size].reshape(tiles * groups, count, 64 * bits), bits)
    scales = np.ascontiguousarray(data[:, size:]).view("<f2").astype(np.float32)
    y = levels[codes] @ hadamard(GROUP) * (scales * unit / np.sqrt(np.float32(GROUP)))[:, :, None]
    values = y.reshape(tiles, groups, TILE_ROWS, GROUP) * factors[None, :, None, :]
    return values.transpose(0, 2, 1, 3).reshape(tiles * TILE_ROWS, groups * GROUP)[:rows, :cols]


class Bundle:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.manifest = json.loads((folder / "cactus.json").read_text())
        if self.manifest["format_version"] != 1:
            sys.exit(f"format version {self.manifest['format_version']}; this reads 1")
        self.weights = SafeTensors(folder / "weights.safetensors")
        words = [int(word, 16) for word in self.manifest["quantiser"]["rotation_signs"]]
        self.signs = np.array([1 - 2 * (words[i // 64] >> i % 64 & 1) for i in range(GROUP)], np.float32)

    def tensor(self, name):
        """A tensor as float32 [rows, cols]."""
        entry = self.manifest["tensors"][name]
        rows, cols, kind = entry["rows"], entry["cols"], entry["format"]
        data = self.weights.raw(name)
        if kind == "bf16":
            return bf16(data.view("<u2")).reshape(rows, cols)
        if kind in PLAIN:
            return data.view(PLAIN[kind]).astype(np.float32).reshape(rows, cols)
        if kind in TCQ_BITS:
            levels, base = data[:64].view(np.int8), data[64:68].view("<u4")[0]
            return decode_cq(data[HEADER:], rows, cols, TCQ_BITS[kind], levels, self.signs, base)[:, :cols]
        if kind in BLOCK_BITS:
            return decode_blocks(data, rows, cols, BLOCK_BITS[kind])
        if kind in BOOK_BITS:
            return decode_book(data, rows, cols, BOOK_BITS[kind])
        bits = CQ_BITS[kind]
        levels = None if bits == 8 else np.array(self.manifest["quantiser"]["codebooks"][str(bits)], np.int8)
        return decode_cq(data, rows, cols, bits, levels, self.signs)[:, :cols]


PARTS = {
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.out": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "attn.norm": ["input_layernorm"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
FUSED = {"attn.qkv": ["self_attn.qkv_proj"], "mlp.gate_up": ["mlp.gate_up_proj"]}
WHOLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


def sources(name, bundle):
    """The checkpoint tensors whose rows a bundle tensor stacks."""
    whole = name.split(".")[0]
    if whole in WHOLE:
        return [WHOLE[whole]]
    layer, part = re.fullmatch(r"layers\.(\d+)\.(.+)", name).groups()
    sandwich = f"layers.{layer}.mlp.post_norm" in bundle.manifest["tensors"]
    part, kind = (part[:-5], "bias") if part.endswith(".bias") else (part, "weight")
    norms = {
        "mlp.norm": ["pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"],
        "attn.post_norm": ["post_attention_layernorm"],
        "mlp.post_norm": ["post_feedforward_layernorm"],
    }
    names = {**PARTS, **norms, **(FUSED if bundle.manifest["family"] == "phi3" else {})}[part]
    return [f"model.layers.{layer}.{n}.{kind}" for n in names]


def compare(bundle, folder):
    """Holds every tensor against the checkpoint it was made from; returns the number of disagreements."""
    files = [SafeTensors(path) for path in sorted(pathlib.Path(folder).glob("*.safetensors"))]
    home = {name: file for file in files for name in file.header}
    gemma = bundle.manifest["family"].startswith("gemma")
    wrong, signal_all, noise_all = 0, 0.0, 0.0
    for name, entry in bundle.manifest["tensors"].items():
        w = np.concatenate([home[s].float(s) for s in sources(name, bundle)]).reshape(-1, entry["cols"])
        first = entry.get("first_row", 0)
        w = w[first : first + entry["rows"]]
        if gemma and name.endswith("norm"):
            w = w + np.float32(1)  # stored as w, meant as 1 + w
        difference = (bundle.tensor(name) - w).ravel()
        # f64 sums without an f64 copy of the matrix
        noise = np.einsum("i,i->", difference, difference, dtype=np.float64)
        signal = np.einsum("i,i->", w.ravel(), w.ravel(), dtype=np.float64)
        signal_all, noise_all = signal_all + signal, noise_all + noise
        measured = float(np.sqrt(noise / signal)) if signal else 0.0
        said = entry["relative_error"]
        same = abs(measured - said) <= 1e-3 * said + 1e-9
        wrong += not same
        print(f"{name:28} {entry['format']:>5}  measured {measured:.6f}  manifest {said:.6f}"
              f"{'' if same else '  DIFFERENT'}")
    print(f"all: relative error {np.sqrt(noise_all / signal_all):.5f}, {wrong} of {len(bundle.manifest['tensors'])} differ")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("tensor", nargs="?")
    parser.add_argument("-o", "--output", help="write the tensor to this .npy file")
    parser.add_argument("--against", metavar="CHECKPOINT", help="a Hugging Face folder with safetensors")
    args = parser.parse_args()
    bundle = Bundle(args.bundle)
    if args.against:
        sys.exit(1 if compare(bundle, args.against) else 0)
    if args.tensor is None:
        for name, entry in bundle.manifest["tensors"].items():
            print(f"{name:28} {entry['rows']:>7} x {entry['cols']:<6} {entry['format']:>5}  {entry['relative_error']:.5f}")
        return
    if args.tensor not in bundle.manifest["tensors"]:
        sys.exit(f"no tensor {args.tensor}")
    values = bundle.tensor(args.tensor)
    if args.output:
        np.save(args.output, values)
    else:
        print(values.shape)
        print(values[:4, :8])


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)  # the reader of a pipe has gone
