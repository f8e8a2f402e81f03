//! The values of GGUF metadata.

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Unsigned, 8 bits.
    U8(u8),
    /// Signed, 8 bits.
    I8(i8),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 16 bits.
    I16(i16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Signed, 64 bits.
    I64(i64),
    /// Single precision.
    F32(f32),
    /// Double precision.
    F64(f64),
    /// True or false.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Values of one type.
    Array(Array),
}

/// An array of one element type; kept typed, since a value each would take many times the file's bytes.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Unsigned, 8 bits.
    U8(Vec<u8>),
    /// Signed, 8 bits.
    I8(Vec<i8>),
    /// Unsigned, 16 bits.
    U16(Vec<u16>),
    /// Signed, 16 bits.
    I16(Vec<i16>),
    /// Unsigned, 32 bits.
    U32(Vec<u32>),
    /// Signed, 32 bits.
    I32(Vec<i32>),
    /// Unsigned, 64 bits.
    U64(Vec<u64>),
    /// Signed, 64 bits.
    I64(Vec<i64>),
    /// Single precision.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
    /// True or false.
    Bool(Vec<bool>),
    /// UTF-8 texts.
    String(Vec<String>),
    /// Arrays.
    Array(Vec<Array>),
}

impl Value {
    /// The number, if it is a whole one and not negative, of whatever width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// The number, if it is a fraction. An f32 becomes the f64 of its shortest decimal form, so that the 1e-5 that
    /// someone wrote does not turn into 9.999999747378752e-6.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => v.to_string().parse().ok(),
            Self::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The truth value, if it is one.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(v) = *self { Some(v) } else { None }
    }

    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(v) = self { Some(v) } else { None }
    }

    /// The texts, if it is an array of them.
    pub fn as_strings(&self) -> Option<&[String]> {
        if let Self::Array(Array::String(v)) = self { Some(v) } else { None }
    }
}
