//! What this machine can do at best: the ceilings that benchmarks and `phalanx doctor` compare with.
//!
//! Measure in the same run as the thing compared: on a shared machine the ceiling itself moves. Rates are per second of each
//! thread's own processor time, so that somebody else's work on the same cores does not lower them.

use crate::scratch::HugeBuf;
use crate::team::SendPtr;
use crate::{Device, Isa};
use std::io;
use std::sync::Mutex;
use std::time::Duration;

/// How long one attempt lasts on each thread; the best attempt counts.
const ATTEMPT: Duration = Duration::from_millis(15);
const ATTEMPTS: usize = 5;

/// Multiply-adds from registers to registers at the device's instruction set, all threads together, in GFLOP/s.
pub fn fma_gflops(dev: &Device) -> f64 {
    best_sum(dev, &|_| {
        let flop = fma_burst(dev.isa());
        flop / 1e9
    })
}

/// The same for the instructions that less exact products are made with, where the device uses them: pairs of bf16, and bytes (10⁹ operations a
/// second). Tiles of AMX are not measured.
pub fn low_precision_gflops(dev: &Device) -> LowPrecisionPeaks {
    #[cfg(target_arch = "x86_64")]
    if dev.isa() >= Isa::Avx512 {
        let rate = |burst: unsafe fn() -> f64| {
            // SAFETY: called where the processor has the instruction, below.
            best_sum(dev, &|_| unsafe { burst() } / 1e9)
        };
        let pairs = dev.isa() == Isa::Avx512 && crate::isa::has_fast_bf16_pairs();
        return LowPrecisionPeaks {
            bf16: pairs.then(|| rate(burst_bf16)),
            int8: crate::isa::has_vnni().then(|| rate(burst_int8)),
        };
    }
    let _ = dev;
    LowPrecisionPeaks::default()
}

/// What [`low_precision_gflops`] found.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowPrecisionPeaks {
    /// Pairs of bf16, where products of them are made so.
    pub bf16: Option<f64>,
    /// Bytes with int32 sums.
    pub int8: Option<f64>,
}

/// Reading memory larger than any cache, all threads together, in GB/s (10⁹ bytes). Huge pages, as tensors have.
///
/// # Errors
/// If there is no memory for the buffer (256 MiB).
pub fn read_bandwidth_gbs(dev: &Device) -> io::Result<f64> {
    let buf = HugeBuf::new(BUFFER)?;
    let (base, len) = (SendPtr(buf.as_ptr()), BUFFER / dev.team().threads() / 64 * 64);
    // SAFETY: the mapping holds BUFFER bytes. Written once, so that its pages exist and are not all one page of zeros.
    unsafe { std::ptr::write_bytes(base.get(), 1, BUFFER) };
    Ok(best_sum(dev, &|part| {
        // SAFETY: parts lie inside the mapping, aligned to 64 bytes, and nobody writes.
        let words = unsafe { std::slice::from_raw_parts(base.get().add(part * len).cast::<u64>(), len / 8) };
        std::hint::black_box(sum(dev.isa(), words));
        len as f64 / 1e9
    }))
}

/// Copying memory larger than any cache, all threads together: bytes read plus bytes written, in GB/s (10⁹ bytes).
///
/// # Errors
/// If there is no memory for the buffers (256 MiB).
pub fn copy_bandwidth_gbs(dev: &Device) -> io::Result<f64> {
    let buf = HugeBuf::new(BUFFER)?;
    let (base, len) = (SendPtr(buf.as_ptr()), BUFFER / 2 / dev.team().threads() / 64 * 64);
    // SAFETY: the mapping holds BUFFER bytes.
    unsafe { std::ptr::write_bytes(base.get(), 1, BUFFER) };
    Ok(best_sum(dev, &|part| {
        // SAFETY: reads from the first half, writes to the second, each part its own range.
        unsafe {
            let from = base.get().add(part * len);
            std::ptr::copy_nonoverlapping(from, from.add(BUFFER / 2), len);
        }
        2.0 * len as f64 / 1e9
    }))
}

/// What a kernel can reach at best here: a roofline (Williams, Waterman & Patterson, Communications of the ACM 52, 2009).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Multiply-adds, GFLOP/s.
    pub gflops: f64,
    /// The faster of reading and copying memory, GB/s.
    pub gbs: f64,
}

impl Roofline {
    /// Measures both; takes about a second.
    ///
    /// # Errors
    /// If there is no memory for the buffers (256 MiB).
    pub fn measure(dev: &Device) -> io::Result<Roofline> {
        let gbs = read_bandwidth_gbs(dev)?.max(copy_bandwidth_gbs(dev)?);
        Ok(Roofline { gflops: fma_gflops(dev), gbs })
    }

    /// Seconds that so much arithmetic and so many bytes take at least.
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        (flops / (self.gflops * 1e9)).max(bytes / (self.gbs * 1e9))
    }
}

const BUFFER: usize = 256 << 20;

/// Runs `work` again and again on every thread at once; the sum over threads of units per second, of the best attempt.
fn best_sum(dev: &Device, work: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
    let threads = dev.team().threads();
    let mut best = 0f64;
    for _ in 0..ATTEMPTS {
        let total = Mutex::new(0f64);
        dev.team().run(threads, &|part, _| {
            let (start, mut done) = (thread_time(), 0f64);
            while thread_time() - start < ATTEMPT {
                done += work(part);
            }
            let seconds = (thread_time() - start).as_secs_f64();
            *total.lock().unwrap_or_else(|e| e.into_inner()) += done / seconds;
        });
        best = best.max(total.into_inner().unwrap_or_else(|e| e.into_inner()));
    }
    best
}

/// Processor time that the calling thread has used.
pub fn thread_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid place for the answer; this clock exists on every system that Rust's threads run on.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

const STEPS: usize = 20_000;

/// Floating-point operations done by one burst of independent multiply-adds.
fn fma_burst(isa: Isa) -> f64 {
    match isa {
        // SAFETY: a `Device` has only instruction sets that the processor has.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { burst_avx512() },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { burst_avx2() },
        _ => burst_portable(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn burst_avx512() -> f64 {
    use std::arch::x86_64::*;
    const CHAINS: usize = 24;
    let (x, y) = (_mm512_set1_ps(std::hint::black_box(0.999)), _mm512_set1_ps(std::hint::black_box(1e-3)));
    let mut acc = [x; CHAINS];
    for _ in 0..STEPS {
        for a in &mut acc {
            *a = _mm512_fmadd_ps(*a, x, y);
        }
    }
    acc.iter().for_each(|a| {
        std::hint::black_box(_mm512_reduce_add_ps(*a));
    });
    (2 * 16 * CHAINS * STEPS) as f64
}

/// # Safety
/// The processor has AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn burst_bf16() -> f64 {
    use std::arch::x86_64::*;
    const CHAINS: usize = 24;
    let x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(std::hint::black_box(0.5)), _mm512_set1_ps(0.25));
    let mut acc = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..STEPS {
        for a in &mut acc {
            *a = _mm512_dpbf16_ps(*a, x, x);
        }
    }
    acc.iter().for_each(|a| {
        std::hint::black_box(_mm512_reduce_add_ps(*a));
    });
    (2 * 32 * CHAINS * STEPS) as f64
}

/// # Safety
/// The processor has AVX-512 VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn burst_int8() -> f64 {
    use std::arch::x86_64::*;
    const CHAINS: usize = 24;
    let x = _mm512_set1_epi8(std::hint::black_box(3));
    let mut acc = [_mm512_setzero_si512(); CHAINS];
    for _ in 0..STEPS {
        for a in &mut acc {
            *a = _mm512_dpbusd_epi32(*a, x, x);
        }
    }
    acc.iter().for_each(|a| {
        std::hint::black_box(_mm512_reduce_add_epi32(*a));
    });
    (2 * 64 * CHAINS * STEPS) as f64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn burst_avx2() -> f64 {
    use std::arch::x86_64::*;
    const CHAINS: usize = 12;
    let (x, y) = (_mm256_set1_ps(std::hint::black_box(0.999)), _mm256_set1_ps(std::hint::black_box(1e-3)));
    let mut acc = [x; CHAINS];
    for _ in 0..STEPS {
        for a in &mut acc {
            *a = _mm256_fmadd_ps(*a, x, y);
        }
    }
    acc.iter().for_each(|a| {
        std::hint::black_box(_mm256_cvtss_f32(*a));
    });
    (2 * 8 * CHAINS * STEPS) as f64
}

fn burst_portable() -> f64 {
    const CHAINS: usize = 32;
    let (x, y) = (std::hint::black_box(0.999f32), std::hint::black_box(1e-3f32));
    let mut acc = [x; CHAINS];
    for _ in 0..STEPS {
        for a in &mut acc {
            *a = *a * x + y;
        }
    }
    std::hint::black_box(acc);
    (2 * CHAINS * STEPS) as f64
}

/// Adds up all words (a multiple of 64 bytes), with the loads of the instruction set.
fn sum(isa: Isa, words: &[u64]) -> u64 {
    match isa {
        // SAFETY: a `Device` has only instruction sets that the processor has.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { sum_avx512(words) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { sum_avx2(words) },
        _ => words.iter().fold(0, |s, w| s.wrapping_add(*w)),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    let mut acc = [_mm512_setzero_si512(); 4];
    for c in words.chunks(32) {
        for (a, w) in acc.iter_mut().zip(c.chunks_exact(8)) {
            // SAFETY: eight words are one vector.
            *a = _mm512_add_epi64(*a, unsafe { _mm512_loadu_si512(w.as_ptr().cast()) });
        }
    }
    acc.iter().fold(0, |s, a| s.wrapping_add(_mm512_reduce_add_epi64(*a) as u64))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    let mut acc = [_mm256_setzero_si256(); 4];
    for c in words.chunks(16) {
        for (a, w) in acc.iter_mut().zip(c.chunks_exact(4)) {
            // SAFETY: four words are one vector.
            *a = _mm256_add_epi64(*a, unsafe { _mm256_loadu_si256(w.as_ptr().cast()) });
        }
    }
    acc.iter().fold(0u64, |s, a| {
        let mut lanes = [0u64; 4];
        // SAFETY: the four lanes are exactly the array.
        unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), *a) };
        lanes.iter().fold(s, |s, l| s.wrapping_add(*l))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_positive_for_every_instruction_set() {
        for isa in Isa::available() {
            let dev = Device::with_isa(isa, 1).unwrap();
            assert!(fma_gflops(&dev) > 0.0);
            assert_eq!(sum(isa, &[3; 104]), 312);
        }
        let dev = Device::new(2);
        assert!(read_bandwidth_gbs(&dev).unwrap() > 0.0 && copy_bandwidth_gbs(&dev).unwrap() > 0.0);
    }
}
