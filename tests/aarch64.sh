#!/usr/bin/env bash
# Runs the kernel tests on emulated AArch64 CPUs, one for each instruction-set level:
#
#   tests/aarch64.sh
#
# Needs Rust's standard library for the target, a cross linker with a static C library, and QEMU's user-mode
# emulator; without them it says so in one line and succeeds. Emulation proves results, not speed.
#
# CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER  linker (default: aarch64-linux-gnu-gcc)
# CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER  runner; one that does not start with qemu-aarch64 is taken for
#                                                a real device and used once
# CACTUS_AARCH64_DEVICE                          1: also `benchmark --android` with a pretended phone that is the emulator
# CACTUS_AARCH64_TEST_ARGS                       other arguments for `cargo test` (default: --lib)
set -euo pipefail
target=aarch64-unknown-linux-gnu
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=${CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER:-aarch64-linux-gnu-gcc}
runner=${CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER:-}

skip() {
  echo "SKIPPED, AArch64 KERNELS NOT TESTED: $1"
  exit 0
}

cd "$(dirname "$0")/.."
case $(uname -m) in aarch64 | arm64) skip "this machine is AArch64 itself, where plain 'cargo test' runs these kernels" ;; esac
command -v cargo >/dev/null || skip "there is no cargo"
libraries=$("${RUSTC:-rustc}" --print target-libdir --target $target 2>/dev/null) || skip "rustc does not know $target"
compgen -G "$libraries/libstd-*.rlib" >/dev/null || skip "rustc has no standard library for $target (rustup target add $target)"
command -v "$CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER" >/dev/null ||
  skip "there is no linker $CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER"
if [ -z "$runner" ]; then
  runner=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || skip "there is no qemu-aarch64-static or qemu-aarch64"
fi

# Static, so that the emulator needs no AArch64 system libraries.
export RUSTFLAGS="${RUSTFLAGS-} -C target-feature=+crt-static"

# Runs the tests with the given runner; the best level must be the one named, so that none is left out unseen.
check() {
  echo "== $1 ${2:+(expects $2)}"
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$1 CACTUS_TEST_BEST_LEVEL=${2:-} \
    cargo test --target $target ${CACTUS_AARCH64_TEST_ARGS:---lib} -- kernels:: quant::
}

program=${runner%% *}
case ${program##*/} in
  qemu-aarch64*)
    # Of several -cpu the emulator takes the last one.
    check "$runner -cpu cortex-a53" neon
    check "$runner -cpu cortex-a76" neon-dotprod
    check "$runner -cpu max" neon-i8mm
    if [ -n "${CACTUS_AARCH64_DEVICE:-}" ]; then
      cargo build --release --target $target
      device=$(mktemp -d)
      trap 'rm -rf "$device"' EXIT
      program=${CARGO_TARGET_DIR:-$PWD/target}/$target/release/cactus
      printf '#!/bin/sh\nexec %s -cpu max %s "$@"\n' "$runner" "$program" >"$device/program"
      chmod +x "$device/program"
      RUSTFLAGS='' CACTUS_TEST_DEVICE_PROGRAM=$device/program cargo test --release --test main -- an_android_device_measures
    fi
    ;;
  *) check "$runner" ;;
esac
echo "AArch64 tests passed"
