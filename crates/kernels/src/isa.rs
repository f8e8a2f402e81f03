//! Which instruction set a call runs on, chosen at run time.

use std::fmt;

/// An instruction-set level that the kernels have code for, weakest first.
///
/// The level decides the rounding of a result (fused or separate multiply-add, lane order of a reduction), so two levels
/// agree within rounding but not bit for bit (Avx512 and Amx differ in matrix products only). One level gives the same bits on every machine that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, whatever the processor.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// AVX-512, and matrix products on AMX tiles with the precision of f32 (docs of `gemm`).
    Amx,
}

impl Isa {
    /// The best level of this processor.
    pub fn detect() -> Isa {
        *Isa::available().last().unwrap_or(&Isa::Portable)
    }

    /// Every level that this processor can run, weakest first. Tests run all of them.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut all = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                all.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                {
                    all.push(Isa::Avx512);
                    if crate::gemm::amx_available() {
                        all.push(Isa::Amx);
                    }
                }
            }
        }
        all
    }
}

/// Beside AVX-512: whether the processor multiplies bytes (VPDPBUSD).
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512vnni")
}

/// Beside AVX-512: whether the processor multiplies pairs of bf16 (VDPBF16PS) faster than f32. AMD's that have the instruction do, at twice the
/// rate; Intel's make half as many products with it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_fast_bf16_pairs() -> bool {
    // Asked for every product, and CPUID takes its time on a virtual machine.
    static FAST: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        // "AuthenticAMD"
        let amd = (vendor.ebx, vendor.edx, vendor.ecx) == (0x6874_7541, 0x6974_6E65, 0x444D_4163);
        amd && is_x86_feature_detected!("avx512bf16")
    });
    *FAST
}

/// Family, model and stepping of the processor, or its architecture where there is no such thing.
pub fn processor_signature() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(1).eax;
        let (family, model) = ((id >> 8) & 15, (id >> 4) & 15);
        let family = if family == 15 { family + ((id >> 20) & 255) } else { family };
        let model = if family >= 6 { model + ((id >> 12) & 0xF0) } else { model };
        format!("family {family}, model {model}, stepping {}", id & 15)
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::env::consts::ARCH.to_owned()
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2+fma",
            Isa::Avx512 => "avx512",
            Isa::Amx => "avx512+amx",
        })
    }
}
