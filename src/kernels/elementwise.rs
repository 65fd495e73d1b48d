//! Operations on every element: residual add, gated activations, scaling, soft caps.

use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};
use serde::{Deserialize, Serialize};

/// Activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// `x / (1 + e^-x)`
    Silu,
    /// The tanh form of GELU (Hendrycks and Gimpel, <https://arxiv.org/abs/1606.08415>).
    GeluTanh,
    /// `x / 2 * (1 + erf(x / sqrt 2))`
    Gelu,
}

#[inline(always)]
pub(super) unsafe fn tanh<L: Lanes>(x: L) -> L {
    unsafe {
        let one = L::splat(1.0);
        one.sub(L::splat(2.0).div(x.add(x).exp().add(one)))
    }
}

#[inline(always)]
unsafe fn silu<L: Lanes>(x: L) -> L {
    unsafe { x.div(L::splat(1.0).add(L::splat(0.0).sub(x).exp())) }
}

#[inline(always)]
unsafe fn gelu_tanh<L: Lanes>(x: L) -> L {
    unsafe {
        let cubic = x.mul(x).mul(x).fma(L::splat(0.044_715), x);
        let t = tanh(cubic.mul(L::splat(0.797_884_6)));
        x.mul(L::splat(0.5)).mul(t.add(L::splat(1.0)))
    }
}

/// GELU with the error function, by formula 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7.
#[inline(always)]
unsafe fn gelu<L: Lanes>(x: L) -> L {
    unsafe {
        let one = L::splat(1.0);
        let z = x.abs().mul(L::splat(std::f32::consts::FRAC_1_SQRT_2));
        let t = one.div(z.fma(L::splat(0.327_591_1), one));
        let mut p = L::splat(1.061_405_4);
        for c in [-1.453_152_1, 1.421_413_8, -0.284_496_72, 0.254_829_6] {
            p = p.fma(t, L::splat(c));
        }
        // Of |x| / sqrt 2; that of a negative number is the negative, which the factor |x| takes in.
        let erf = one.sub(p.mul(t).mul(L::splat(0.0).sub(z.mul(z)).exp()));
        x.abs().fma(erf, x).mul(L::splat(0.5))
    }
}

/// A function of two elements. A trait, because a closure would not be compiled for the instruction set of
/// the kernel that calls it.
trait Map2<L> {
    unsafe fn at(&self, a: L, b: L) -> L;
}

struct Sum;
struct Silu;
struct GeluTanh;
struct Gelu;
/// The first element by an activation, times the second.
struct Gated<A>(A);
struct Times(f32);
struct SoftCap(f32);

impl<L: Lanes> Map2<L> for Sum {
    #[inline(always)]
    unsafe fn at(&self, a: L, b: L) -> L {
        unsafe { a.add(b) }
    }
}
impl<L: Lanes> Map2<L> for Silu {
    #[inline(always)]
    unsafe fn at(&self, a: L, _: L) -> L {
        unsafe { silu(a) }
    }
}
impl<L: Lanes> Map2<L> for GeluTanh {
    #[inline(always)]
    unsafe fn at(&self, a: L, _: L) -> L {
        unsafe { gelu_tanh(a) }
    }
}
impl<L: Lanes> Map2<L> for Gelu {
    #[inline(always)]
    unsafe fn at(&self, a: L, _: L) -> L {
        unsafe { gelu(a) }
    }
}
impl<L: Lanes, A: Map2<L>> Map2<L> for Gated<A> {
    #[inline(always)]
    unsafe fn at(&self, a: L, b: L) -> L {
        unsafe { self.0.at(a, b).mul(b) }
    }
}
impl<L: Lanes> Map2<L> for Times {
    #[inline(always)]
    unsafe fn at(&self, a: L, _: L) -> L {
        unsafe { a.mul(L::splat(self.0)) }
    }
}
impl<L: Lanes> Map2<L> for SoftCap {
    #[inline(always)]
    unsafe fn at(&self, a: L, _: L) -> L {
        unsafe { tanh(a.mul(L::splat(1.0 / self.0))).mul(L::splat(self.0)) }
    }
}

/// `out[i] = f(a[i], b[i])`; `out` may be `a`. The end that fills no lanes goes through a buffer.
///
/// # Safety
/// All three are valid for `n` elements.
#[inline(always)]
unsafe fn map2<L: Lanes>(n: usize, a: *const f32, b: *const f32, out: *mut f32, f: impl Map2<L>) {
    unsafe {
        let whole = n - n % LANES;
        let mut i = 0;
        while i < whole {
            f.at(L::load(a.add(i)), L::load(b.add(i))).store(out.add(i));
            i += LANES;
        }
        if whole < n {
            let (mut x, mut y) = ([0.0f32; LANES], [0.0f32; LANES]);
            std::ptr::copy_nonoverlapping(a.add(whole), x.as_mut_ptr(), n - whole);
            std::ptr::copy_nonoverlapping(b.add(whole), y.as_mut_ptr(), n - whole);
            f.at(L::load(x.as_ptr()), L::load(y.as_ptr())).store(x.as_mut_ptr());
            std::ptr::copy_nonoverlapping(x.as_ptr(), out.add(whole), n - whole);
        }
    }
}

#[inline(always)]
unsafe fn add_lanes<L: Lanes>(a: &mut [f32], b: &[f32]) {
    let p = a.as_mut_ptr();
    unsafe { map2::<L>(a.len(), p, b.as_ptr(), p, Sum) }
}

/// `out = act(gate) * up`, element by element.
#[inline(always)]
unsafe fn gate_lanes<L: Lanes>(act: Act, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (n, g, u, o) = (out.len(), gate.as_ptr(), up.as_ptr(), out.as_mut_ptr());
    unsafe {
        match act {
            Act::Silu => map2::<L>(n, g, u, o, Gated(Silu)),
            Act::GeluTanh => map2::<L>(n, g, u, o, Gated(GeluTanh)),
            Act::Gelu => map2::<L>(n, g, u, o, Gated(Gelu)),
        }
    }
}

/// `x = act(x)`
#[inline(always)]
unsafe fn activate_lanes<L: Lanes>(act: Act, x: &mut [f32]) {
    let (n, p) = (x.len(), x.as_mut_ptr());
    unsafe {
        match act {
            Act::Silu => map2::<L>(n, p, p, p, Silu),
            Act::GeluTanh => map2::<L>(n, p, p, p, GeluTanh),
            Act::Gelu => map2::<L>(n, p, p, p, Gelu),
        }
    }
}

#[inline(always)]
unsafe fn scale_lanes<L: Lanes>(x: &mut [f32], factor: f32) {
    let p = x.as_mut_ptr();
    unsafe { map2::<L>(x.len(), p, p, p, Times(factor)) }
}

/// `cap * tanh(x / cap)`
#[inline(always)]
unsafe fn soft_cap_lanes<L: Lanes>(x: &mut [f32], cap: f32) {
    let p = x.as_mut_ptr();
    unsafe { map2::<L>(x.len(), p, p, p, SoftCap(cap)) }
}

variants!(add = add_lanes as fn(a: &mut [f32], b: &[f32]));
variants!(gate = gate_lanes as fn(act: Act, gate: &[f32], up: &[f32], out: &mut [f32]));
variants!(activate = activate_lanes as fn(act: Act, x: &mut [f32]));
variants!(scale = scale_lanes as fn(x: &mut [f32], factor: f32));
variants!(soft_cap = soft_cap_lanes as fn(x: &mut [f32], cap: f32));

/// Elements below which one thread is faster than several.
const GRAIN: usize = 16 * 1024;

/// The element-wise kernels of one level.
#[derive(Clone, Copy)]
pub struct Elementwise {
    add: add::Run,
    gate: gate::Run,
    activate: activate::Run,
    scale: scale::Run,
    soft_cap: soft_cap::Run,
}

impl Elementwise {
    pub fn select(level: Level) -> Self {
        Elementwise {
            add: add::select(level),
            gate: gate::select(level),
            activate: activate::select(level),
            scale: scale::select(level),
            soft_cap: soft_cap::select(level),
        }
    }

    /// `a += b`
    pub fn add(&self, pool: &Pool, a: &mut [f32], b: &[f32]) {
        assert_eq!(a.len(), b.len());
        let a = &Parts::new(a);
        // SAFETY (here and below): `select` checked the level; ranges of different threads are disjoint.
        pool.ranges(b.len(), GRAIN, &|r| unsafe { (self.add)(a.slice(r.clone()), &b[r]) });
    }

    /// `x`: `[rows, 2 * width]`, gate then up in every row; `out`: `[rows, width]`.
    pub fn gate(&self, pool: &Pool, act: Act, x: &[f32], width: usize, out: &mut [f32]) {
        assert!(x.len() == 2 * out.len() && out.len().is_multiple_of(width));
        let rows = out.len() / width;
        // One row is split by columns, several by rows.
        let parts = if rows == 1 { width.div_ceil(GRAIN / 8) } else { 1 };
        let out = &Parts::new(out);
        pool.each(rows * parts, &|_, task| {
            let (row, part) = (task / parts, task % parts);
            let cols = width * part / parts..width * (part + 1) / parts;
            let x = &x[row * 2 * width..][..2 * width];
            let out_range = row * width + cols.start..row * width + cols.end;
            unsafe { (self.gate)(act, &x[cols.clone()], &x[width..][cols], out.slice(out_range)) }
        });
    }

    /// `x = act(x)`
    pub fn activate(&self, pool: &Pool, act: Act, x: &mut [f32]) {
        let n = x.len();
        let x = &Parts::new(x);
        pool.ranges(n, GRAIN / 8, &|r| unsafe { (self.activate)(act, x.slice(r)) });
    }

    /// `x *= factor`
    pub fn scale(&self, pool: &Pool, x: &mut [f32], factor: f32) {
        let n = x.len();
        let x = &Parts::new(x);
        pool.ranges(n, GRAIN, &|r| unsafe { (self.scale)(x.slice(r), factor) });
    }

    /// `x = cap * tanh(x / cap)`
    pub fn soft_cap(&self, pool: &Pool, x: &mut [f32], cap: f32) {
        let n = x.len();
        let x = &Parts::new(x);
        pool.ranges(n, GRAIN, &|r| unsafe { (self.soft_cap)(x.slice(r), cap) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A series of positive terms (Abramowitz and Stegun, 7.1.6).
    fn erf(x: f64) -> f64 {
        let (mut term, mut sum) = (x, 0.0);
        for n in 0..400 {
            sum += term;
            term *= 2.0 * x * x / f64::from(2 * n + 3);
        }
        2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
    }

    #[test]
    fn the_error_function_is_that_of_tables() {
        for (x, value) in [(0.0, 0.0), (0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (-2.0, -0.995_322_265_0)] {
            assert!((erf(x) - value).abs() < 1e-9, "{x}");
        }
    }

    #[test]
    fn against_f64_at_every_level_and_length() {
        let pool = Pool::new(2);
        for level in Level::supported() {
            let k = Elementwise::select(level);
            for n in [1usize, 15, 16, 33, 40_000] {
                let x: Vec<f32> = (0..2 * n).map(|i| ((i * 37 % 401) as f32 - 200.0) / 17.0).collect();
                for (act, f) in [
                    (Act::Silu, (|x| x / (1.0 + (-x).exp())) as fn(f64) -> f64),
                    (Act::Gelu, |x| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))),
                    (Act::GeluTanh, |x| {
                        0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
                    }),
                ] {
                    let mut out = vec![0.0; n];
                    k.gate(&pool, act, &x, n, &mut out);
                    for i in 0..n {
                        let truth = f(f64::from(x[i])) * f64::from(x[n + i]);
                        assert!(
                            (f64::from(out[i]) - truth).abs() < 1e-5 * truth.abs().max(1.0),
                            "{level} {act:?} {n}: {} {truth}",
                            out[i]
                        );
                    }
                    let mut y = x.clone();
                    k.activate(&pool, act, &mut y);
                    for (y, x) in y.iter().zip(&x) {
                        let truth = f(f64::from(*x));
                        assert!((f64::from(*y) - truth).abs() < 1e-5 * truth.abs().max(1.0), "{level} {act:?}: {y} {truth}");
                    }
                }
                let mut y = x.clone();
                k.soft_cap(&pool, &mut y, 5.0);
                for (y, x) in y.iter().zip(&x) {
                    assert!((f64::from(*y) - 5.0 * (f64::from(*x) / 5.0).tanh()).abs() < 5e-6);
                }
                let mut y = x.clone();
                k.add(&pool, &mut y, &x);
                k.scale(&pool, &mut y, 0.25);
                assert!(y.iter().zip(&x).all(|(y, x)| *y == 0.5 * x));
            }
        }
    }
}
