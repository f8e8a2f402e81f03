//! Plain Rust: four values, which every target's compiler can put into a register of its own.

use half::bf16;

use super::Simd;

/// Works on every processor. A multiply-add is two roundings here: the fused one is a slow call without the instruction.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const L: usize = 4;

#[inline(always)]
fn map(a: [f32; L], f: impl Fn(f32) -> f32) -> [f32; L] {
    [f(a[0]), f(a[1]), f(a[2]), f(a[3])]
}

#[inline(always)]
fn zip(a: [f32; L], b: [f32; L], f: impl Fn(f32, f32) -> f32) -> [f32; L] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

impl Simd for Portable {
    type V = [f32; L];
    const LANES: usize = L;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; L] {
        [x; L]
    }
    #[inline(always)]
    fn add(self, a: [f32; L], b: [f32; L]) -> [f32; L] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; L], b: [f32; L]) -> [f32; L] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; L], b: [f32; L]) -> [f32; L] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: [f32; L], b: [f32; L]) -> [f32; L] {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: [f32; L], b: [f32; L], c: [f32; L]) -> [f32; L] {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn fnma(self, a: [f32; L], b: [f32; L], c: [f32; L]) -> [f32; L] {
        self.sub(c, self.mul(a, b))
    }
    #[inline(always)]
    fn max(self, a: [f32; L], b: [f32; L]) -> [f32; L] {
        zip(a, b, larger)
    }
    #[inline(always)]
    fn min(self, a: [f32; L], b: [f32; L]) -> [f32; L] {
        zip(a, b, smaller)
    }
    #[inline(always)]
    fn sqrt(self, a: [f32; L]) -> [f32; L] {
        map(a, f32::sqrt)
    }
    #[inline(always)]
    fn abs(self, a: [f32; L]) -> [f32; L] {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn round(self, a: [f32; L]) -> [f32; L] {
        // Adding 1.5·2²³ leaves no room for a fraction; larger values have none.
        const BIG: f32 = 12_582_912.0;
        map(a, |a| if a.abs() < 4_194_304.0 { (a + BIG) - BIG } else { a })
    }
    #[inline(always)]
    fn scale_by_power(self, a: [f32; L], n: [f32; L]) -> [f32; L] {
        // In two steps: 2ⁿ itself may be out of range. The first is exact, so there is one rounding.
        zip(a, n, |a, n| {
            let n = n as i32;
            let half = n >> 1;
            let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
            a * power(half) * power(n - half)
        })
    }
    #[inline(always)]
    fn select_lt(self, a: [f32; L], b: [f32; L], yes: [f32; L], no: [f32; L]) -> [f32; L] {
        let pick = |i: usize| if a[i] < b[i] { yes[i] } else { no[i] };
        [pick(0), pick(1), pick(2), pick(3)]
    }
    #[inline(always)]
    fn sum(self, a: [f32; L]) -> f32 {
        (a[0] + a[2]) + (a[1] + a[3])
    }
    #[inline(always)]
    fn largest(self, a: [f32; L]) -> f32 {
        larger(larger(a[0], a[2]), larger(a[1], a[3]))
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> [f32; L] {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; L]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: [f32; L]) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; L]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize, fill: f32) -> [f32; L] {
        let mut v = [fill; L];
        for (i, v) in v.iter_mut().enumerate().take(n) {
            // SAFETY: the caller's promise.
            *v = unsafe { *p.add(i) };
        }
        v
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: [f32; L]) {
        for (i, &v) in v.iter().enumerate().take(n) {
            // SAFETY: the caller's promise.
            unsafe { *p.add(i) = v };
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, p: *const bf16) -> [f32; L] {
        // SAFETY: the caller's promise.
        let x = unsafe { p.cast::<[bf16; L]>().read_unaligned() };
        [x[0].to_f32(), x[1].to_f32(), x[2].to_f32(), x[3].to_f32()]
    }
    #[inline(always)]
    unsafe fn store_bf16_ptr(self, p: *mut bf16, v: [f32; L]) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[bf16; L]>().write_unaligned(v.map(bf16::from_f32)) }
    }
    #[inline(always)]
    fn prefetch(self, _p: *const f32) {}
}
