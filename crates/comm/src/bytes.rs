//! Elements as bytes and back: back ends move bytes, and only a reduction asks what they are.

use phalanx_tensor::{DType, Tensor, TensorError};

use crate::element::Element;

/// The bytes of `elements`.
pub(crate) fn of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: an `Element` is a plain number without padding (the trait is sealed), so each of its bytes is initialised.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The bytes of `elements`, to be changed.
pub(crate) fn of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `of`; and any bits are a value of an `Element`, so no write can make an invalid one.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

fn check<T>(ptr: *const u8, len: usize) -> usize {
    assert!(len.is_multiple_of(size_of::<T>()), "{len} bytes are no whole number of elements");
    assert!(len == 0 || ptr.cast::<T>().is_aligned(), "the bytes are not aligned for their elements");
    len / size_of::<T>()
}

/// Bytes that [`of`] gave, as elements again.
pub(crate) fn typed<T: Element>(bytes: &[u8]) -> &[T] {
    let n = check::<T>(bytes.as_ptr(), bytes.len());
    if n == 0 {
        return &[];
    }
    // SAFETY: aligned and whole (checked); any bits are a value of an `Element`.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), n) }
}

/// Bytes that [`of_mut`] gave, as elements again.
pub(crate) fn typed_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    let n = check::<T>(bytes.as_ptr(), bytes.len());
    if n == 0 {
        return &mut [];
    }
    // SAFETY: as in `typed`, and exclusive as `bytes` is.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), n) }
}

/// The bytes of a tensor.
pub(crate) fn of_tensor(tensor: &Tensor) -> Result<&[u8], TensorError> {
    Ok(match tensor.dtype() {
        DType::F32 => of(tensor.f32()?),
        DType::Bf16 => of(tensor.bf16()?),
    })
}

/// The bytes of a tensor, to be changed.
///
/// # Errors
/// If its memory is shared.
pub(crate) fn of_tensor_mut(tensor: &mut Tensor) -> Result<&mut [u8], TensorError> {
    Ok(match tensor.dtype() {
        DType::F32 => of_mut(tensor.f32_mut()?),
        DType::Bf16 => of_mut(tensor.bf16_mut()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let mut x = [1.5f32, -2.0, f32::NAN];
        assert_eq!(of(&x).len(), 12);
        of_mut(&mut x)[..4].copy_from_slice(&7f32.to_ne_bytes());
        assert_eq!(typed::<f32>(of(&x))[..2], [7.0, -2.0]);
        typed_mut::<f32>(of_mut(&mut x))[1] = 3.0;
        assert_eq!(x[1], 3.0);
        assert!(typed::<u64>(&[]).is_empty() && typed_mut::<u64>(&mut []).is_empty());
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn misaligned_bytes_are_refused() {
        let words = [0u64; 2];
        let _ = typed::<f32>(&of(&words)[1..5]);
    }
}
