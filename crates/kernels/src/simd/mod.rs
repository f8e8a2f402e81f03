//! The tile level of the row kernels: vectors of f32, one type of register for each [`Isa`].
//!
//! A row kernel is written once, over [`Simd`], with the macro [`simd_fn!`]; the macro compiles it for every instruction set
//! and picks one at run time. A vector loaded past the end of a row is filled up (with zeros, or what the kernel asks for), so
//! the last elements of a row go through the same instructions as the others and get the same bits.
//!
//! `Simd` values are proofs: an `Avx512` can only be made where the processor is known to have those instructions, which is why
//! its arithmetic is safe to call. Everything is `#[inline(always)]`, else the instructions would not reach the caller's
//! function, the only one that is compiled for them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod math;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

use half::bf16;

use crate::Mat;

/// A vector register of f32 and what can be done with it.
///
/// `max` and `min` return the second argument if either is NaN (as the x86 instructions do).
pub(crate) trait Simd: Copy {
    /// One register.
    type V: Copy;
    /// Values in one register.
    const LANES: usize;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a·b + c, rounded once where the instruction set has it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// c − a·b, rounded as [`Simd::fma`].
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// To the nearest whole number, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// a·2ⁿ for whole n in ±300, rounded once even where the result is subnormal.
    fn scale_by_power(self, a: Self::V, n: Self::V) -> Self::V;
    /// Lane by lane: `yes` where a < b, else `no`.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// The sum of the lanes, halves folded onto each other.
    fn sum(self, a: Self::V) -> f32;
    /// The greatest lane.
    fn largest(self, a: Self::V) -> f32;

    /// LANES values from `p`.
    ///
    /// # Safety
    /// `p` must be readable for LANES values.
    unsafe fn load_ptr(self, p: *const f32) -> Self::V;
    /// LANES values to `p`.
    ///
    /// # Safety
    /// `p` must be writable for LANES values.
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V);
    /// The first `n` < LANES values from `p`, the others `fill`.
    ///
    /// # Safety
    /// `p` must be readable for `n` values.
    unsafe fn load_part(self, p: *const f32, n: usize, fill: f32) -> Self::V;
    /// The first `n` < LANES values to `p`.
    ///
    /// # Safety
    /// `p` must be writable for `n` values.
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::V);
    /// LANES bf16 values, widened.
    ///
    /// # Safety
    /// `p` must be readable for LANES values.
    unsafe fn load_bf16_ptr(self, p: *const bf16) -> Self::V;
    /// LANES values rounded to bf16, to nearest even; NaN stays NaN.
    ///
    /// # Safety
    /// `p` must be writable for LANES values.
    unsafe fn store_bf16_ptr(self, p: *mut bf16, v: Self::V);

    /// Whether there is [`Simd::transpose16`].
    const TRANSPOSES: bool = false;
    /// Turns 16 registers of 16 values, as rows, into their columns.
    #[inline(always)]
    fn transpose16(self, _rows: [Self::V; 16]) -> [Self::V; 16] {
        unreachable!("TRANSPOSES is false")
    }

    /// Asks for the cache line at `p`, which may be any address.
    fn prefetch(self, p: *const f32);

    /// The values of `x` from `i` on; zero past its end.
    #[inline(always)]
    fn load(self, x: &[f32], i: usize) -> Self::V {
        self.load_or(x, i, 0.0)
    }

    /// The values of `x` from `i` on; `fill` past its end.
    #[inline(always)]
    fn load_or(self, x: &[f32], i: usize, fill: f32) -> Self::V {
        if i + Self::LANES <= x.len() {
            // SAFETY: the range was just checked.
            unsafe { self.load_ptr(x.as_ptr().add(i)) }
        } else {
            let x = x.get(i..).unwrap_or_default();
            // SAFETY: `x` has fewer than LANES values.
            unsafe { self.load_part(x.as_ptr(), x.len(), fill) }
        }
    }

    /// Writes to `x` from `i` on, as far as it goes.
    #[inline(always)]
    fn store(self, x: &mut [f32], i: usize, v: Self::V) {
        if i + Self::LANES <= x.len() {
            // SAFETY: the range was just checked.
            unsafe { self.store_ptr(x.as_mut_ptr().add(i), v) }
        } else {
            let x = x.get_mut(i..).unwrap_or_default();
            // SAFETY: `x` has fewer than LANES values.
            unsafe { self.store_part(x.as_mut_ptr(), x.len(), v) }
        }
    }

    /// As [`Simd::load`], widened from bf16.
    #[inline(always)]
    fn load_bf16(self, x: &[bf16], i: usize) -> Self::V {
        if i + Self::LANES <= x.len() {
            // SAFETY: the range was just checked.
            unsafe { self.load_bf16_ptr(x.as_ptr().add(i)) }
        } else {
            let mut part = [bf16::ZERO; 16];
            let x = x.get(i..).unwrap_or_default();
            part[..x.len()].copy_from_slice(x);
            // SAFETY: `part` is as long as the widest register.
            unsafe { self.load_bf16_ptr(part.as_ptr()) }
        }
    }

    /// As [`Simd::store`], rounded to bf16.
    #[inline(always)]
    fn store_bf16(self, x: &mut [bf16], i: usize, v: Self::V) {
        if i + Self::LANES <= x.len() {
            // SAFETY: the range was just checked.
            unsafe { self.store_bf16_ptr(x.as_mut_ptr().add(i), v) }
        } else {
            let mut part = [bf16::ZERO; 16];
            // SAFETY: `part` is as long as the widest register.
            unsafe { self.store_bf16_ptr(part.as_mut_ptr(), v) };
            let x = x.get_mut(i..).unwrap_or_default();
            x.copy_from_slice(&part[..x.len()]);
        }
    }

    /// As [`Simd::load`], from either type.
    #[inline(always)]
    fn load_mat(self, x: Mat<'_>, i: usize) -> Self::V {
        match x {
            Mat::F32(x) => self.load(x, i),
            Mat::Bf16(x) => self.load_bf16(x, i),
        }
    }
}

/// Defines a function written once over a [`Simd`] `s` and compiled for every [`Isa`](crate::Isa); the call takes the Isa first.
///
/// The Isa must be one that this processor has, as a [`Device`](crate::Device)'s always is.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($s:ident $(, $arg:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::Isa $(, $arg: $ty)*) $(-> $ret)? {
            #[inline(always)]
            fn generic<S: $crate::simd::Simd>($s: S $(, $arg: $ty)*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function is compiled for, and so only called with, these features.
                generic(unsafe { $crate::simd::Avx512::new() } $(, $arg)*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                generic(unsafe { $crate::simd::Avx2::new() } $(, $arg)*)
            }

            match isa {
                // SAFETY: an Isa comes from a Device, which checked that the processor has it.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512 | $crate::Isa::Amx => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => generic($crate::simd::Portable $(, $arg)*),
            }
        }
    };
}
pub(crate) use simd_fn;
