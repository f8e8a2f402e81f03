//! Element types that collectives carry, and how they are reduced.

use std::fmt;

use phalanx_tensor::{DType, bf16};

/// What the elements of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// bfloat16; reduced in f32 and rounded once.
    Bf16,
    /// Raw bytes: codes, flags, text.
    U8,
    /// 32-bit signed integer.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit unsigned integer: counts.
    U64,
}

impl ElementType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::Bf16 => 2,
            ElementType::F32 | ElementType::I32 | ElementType::U32 => 4,
            ElementType::F64 | ElementType::U64 => 8,
        }
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> ElementType {
        match dtype {
            DType::F32 => ElementType::F32,
            DType::Bf16 => ElementType::Bf16,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::F32 => "f32",
            ElementType::F64 => "f64",
            ElementType::Bf16 => "bf16",
            ElementType::U8 => "u8",
            ElementType::I32 => "i32",
            ElementType::U32 => "u32",
            ElementType::U64 => "u64",
        })
    }
}

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// x0 + x1 + … in the order of ranks. Integers wrap.
    Sum,
    /// The largest. A NaN on any rank gives NaN, so that it is not hidden.
    Max,
    /// The smallest. A NaN on any rank gives NaN.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}

mod sealed {
    /// Implemented for plain numbers only: no padding, and any bits are a value. `bytes` relies on it.
    pub trait Sealed {}
}

/// A type that collectives carry: f32, f64, [`bf16`], u8, i32, u32, u64. Sealed.
pub trait Element: sealed::Sealed + Copy + Send + Sync + fmt::Debug + 'static {
    /// Its name at run time.
    const TYPE: ElementType;
}

/// An [`Element`] that can be reduced: all but u8, which stands for codes whose sum means nothing.
pub trait Reduce: Element {}

/// The arithmetic behind [`Reduce`].
pub(crate) trait Arithmetic: Reduce {
    /// What partial results are kept in.
    type Acc: Copy + Default;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! element {
    ($($ty:ty => $name:ident),*) => {$(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const TYPE: ElementType = ElementType::$name;
        }
    )*};
}
element!(f32 => F32, f64 => F64, bf16 => Bf16, u8 => U8, i32 => I32, u32 => U32, u64 => U64);

macro_rules! float {
    ($ty:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        impl Reduce for $ty {}
        impl Arithmetic for $ty {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> $ty {
                $narrow(acc)
            }
            #[inline(always)]
            fn sum(a: $acc, b: $acc) -> $acc {
                a + b
            }
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc {
                if a.is_nan() || a > b { a } else { b }
            }
            #[inline(always)]
            fn min(a: $acc, b: $acc) -> $acc {
                if a.is_nan() || a < b { a } else { b }
            }
        }
    };
}
float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);

macro_rules! integer {
    ($($ty:ty),*) => {$(
        impl Reduce for $ty {}
        impl Arithmetic for $ty {
            type Acc = $ty;
            #[inline(always)]
            fn widen(self) -> $ty {
                self
            }
            #[inline(always)]
            fn narrow(acc: $ty) -> $ty {
                acc
            }
            #[inline(always)]
            fn sum(a: $ty, b: $ty) -> $ty {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn max(a: $ty, b: $ty) -> $ty {
                Ord::max(a, b)
            }
            #[inline(always)]
            fn min(a: $ty, b: $ty) -> $ty {
                Ord::min(a, b)
            }
        }
    )*};
}
integer!(i32, u32, u64);
