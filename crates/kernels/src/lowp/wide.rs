//! Plain loops, compiled once for each instruction set: the compiler makes the vector code.
//!
//! The other row kernels are written over [`Simd`](crate::simd::Simd), vectors of f32. Codes are whole-number arithmetic with
//! variable shifts and narrow stores, which compilers vectorise well; what it takes is a caller compiled for the registers.
//! Only single operations of IEEE 754 and of whole numbers are used and nothing is summed, so every set gives the same bits.

use crate::Isa;

/// A loop and what it works on. `run` must be `#[inline(always)]`, as must all that it calls.
pub(crate) trait Loop {
    fn run(self);
}

/// Runs the loop with the registers of `isa`, which this processor must have, as a [`Device`](crate::Device)'s always does.
pub(crate) fn run<L: Loop>(isa: Isa, work: L) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    fn avx512<L: Loop>(work: L) {
        work.run();
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2<L: Loop>(work: L) {
        work.run();
    }

    match isa {
        // SAFETY: an Isa comes from a Device, which checked that the processor has it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { avx512(work) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(work) },
        _ => work.run(),
    }
}
