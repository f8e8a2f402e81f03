//! The tile unit itself: whether it is there, and its setting.

use std::arch::asm;
use std::sync::OnceLock;

/// Whether this processor has the unit with bf16, and the system lets this process use it. Asks for that permission.
pub(crate) fn available() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| has_instructions() && may_use())
}

fn has_instructions() -> bool {
    use std::arch::x86_64::__cpuid_count;
    let leaf = __cpuid_count(7, 0);
    let (bf16, tile) = (leaf.edx >> 22 & 1, leaf.edx >> 24 & 1);
    bf16 == 1 && tile == 1 && is_x86_feature_detected!("avx512bf16")
}

/// Linux saves the registers of the unit only for processes that asked (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn may_use() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: asks for a permission; touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn may_use() -> bool {
    false
}

/// Eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Setting {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static SETTING: Setting = {
    let mut s = Setting { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut i = 0;
    while i < 8 {
        s.row_bytes[i] = 64;
        s.rows[i] = 16;
        i += 1;
    }
    s
};

/// Makes the unit ready on this thread; its registers are zero afterwards.
///
/// # Safety
/// [`available`] is true.
pub(super) unsafe fn configure() {
    // SAFETY: the setting is a valid one; all tile registers are declared lost.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const SETTING, options(nostack),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

/// Gives the registers up, so that the system need not save them.
///
/// # Safety
/// [`available`] is true.
pub(super) unsafe fn release() {
    // SAFETY: nothing is kept in the registers between calls.
    unsafe {
        asm!("tilerelease", options(nostack, nomem),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}
