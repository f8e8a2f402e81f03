//! Copies of large buffers past the caches.
//!
//! An ordinary store reads its line from memory before it writes it. For a buffer that does not fit the cache that read is
//! wasted, a third of the traffic of a copy; and what the copy pushes out of the cache is missed by the work around it.
//! Non-temporal stores do neither.

/// Copies of at least so many bytes go past the caches: less may well be read again from them.
pub const LARGE: usize = 4 << 20;

/// Copies, past the caches if it is [`LARGE`].
///
/// # Panics
/// If the lengths differ.
pub fn copy(target: &mut [u8], source: &[u8]) {
    if source.len() >= LARGE { copy_past_cache(target, source) } else { target.copy_from_slice(source) }
}

/// Copies past the caches where the processor can: for the pieces of a copy that is [`LARGE`] as a whole. The result is visible
/// to other threads as after an ordinary copy.
///
/// # Panics
/// If the lengths differ.
pub fn copy_past_cache(target: &mut [u8], source: &[u8]) {
    assert_eq!(target.len(), source.len(), "lengths of a copy");
    #[cfg(target_arch = "x86_64")]
    {
        let head = target.as_ptr().align_offset(64).min(target.len());
        let (head_to, rest) = target.split_at_mut(head);
        let (body_to, tail_to) = rest.split_at_mut(rest.len() / 64 * 64);
        let (head_from, rest) = source.split_at(head);
        let (body_from, tail_from) = rest.split_at(body_to.len());
        head_to.copy_from_slice(head_from);
        // SAFETY: the body is aligned to 64 bytes and a multiple of them long, and both slices are as long.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                lines_avx512(body_to, body_from)
            } else {
                lines_sse2(body_to, body_from)
            }
        }
        tail_to.copy_from_slice(tail_from);
    }
    #[cfg(not(target_arch = "x86_64"))]
    target.copy_from_slice(source);
}

/// # Safety
/// The processor has AVX-512 F; `to` is aligned to 64 bytes, its length a multiple of 64 and that of `from`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn lines_avx512(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{_mm_sfence, _mm512_loadu_si512, _mm512_stream_si512};
    for (to, from) in to.chunks_exact_mut(64).zip(from.chunks_exact(64)) {
        // SAFETY: both pieces are 64 bytes long; `to` is aligned, as its slice is and all pieces before are of 64 bytes.
        unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), _mm512_loadu_si512(from.as_ptr().cast())) };
    }
    // Orders the stores before whatever tells other threads of them.
    _mm_sfence();
}

/// # Safety
/// `to` is aligned to 16 bytes, its length a multiple of 64 and that of `from`.
#[cfg(target_arch = "x86_64")]
unsafe fn lines_sse2(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    for (to, from) in to.chunks_exact_mut(64).zip(from.chunks_exact(64)) {
        let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
        // SAFETY: both pieces hold four vectors; `to` is aligned, as its slice is and all pieces before are of 64 bytes.
        unsafe {
            let line = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            line.into_iter().enumerate().for_each(|(i, v)| _mm_stream_si128(to.add(i), v));
        }
    }
    // SAFETY: every x86-64 processor has it; it orders the stores before whatever tells other threads of them.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length() {
        let source: Vec<u8> = (0..1000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for offset in 0..65 {
            for len in [0, 1, 15, 63, 64, 65, 127, 128, 500, 900] {
                for shift in [0, 1, 13] {
                    let mut target = vec![0xAAu8; 1000];
                    copy_past_cache(&mut target[offset..offset + len], &source[shift..shift + len]);
                    assert_eq!(target[offset..offset + len], source[shift..shift + len]);
                    assert!(target[..offset].iter().chain(&target[offset + len..]).all(|&b| b == 0xAA));
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_plain_form_copies_as_well() {
        let source: Vec<u8> = (0..=255).collect();
        let mut target = vec![[0u128; 4]; 4];
        // SAFETY: the slice is aligned to 16 bytes, and both are 256 bytes long.
        unsafe {
            let bytes = std::slice::from_raw_parts_mut(target.as_mut_ptr().cast::<u8>(), 256);
            lines_sse2(bytes, &source);
            assert_eq!(bytes, source);
        }
    }
}
