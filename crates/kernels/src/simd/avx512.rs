//! AVX-512 registers: 16 values.

use std::arch::x86_64::*;

use half::bf16;

use super::Simd;

/// Proof that the processor has AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The processor must have AVX-512 F, BW, VL and DQ.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Avx512(())
    }
}

#[inline(always)]
fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

/// Runs one instruction that the token proves is there.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: `self` proves that the processor has the instruction; pointers are the caller's promise.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        op!(_mm512_sqrt_ps(a))
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        op!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        op!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn scale_by_power(self, a: __m512, n: __m512) -> __m512 {
        op!(_mm512_scalef_ps(a, n))
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        op!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        op!({
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
        })
    }
    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        op!({
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
        })
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> __m512 {
        op!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: __m512) {
        op!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize, fill: f32) -> __m512 {
        op!(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(n), p))
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: __m512) {
        op!(_mm512_mask_storeu_ps(p, first(n), v))
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, p: *const bf16) -> __m512 {
        op!({
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
        })
    }
    #[inline(always)]
    unsafe fn store_bf16_ptr(self, p: *mut bf16, v: __m512) {
        op!({
            let x = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(x), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            let quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let x = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(x));
        })
    }
    const TRANSPOSES: bool = true;
    #[inline(always)]
    fn transpose16(self, rows: [__m512; 16]) -> [__m512; 16] {
        op!(crate::gemm::transpose16(rows))
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}
