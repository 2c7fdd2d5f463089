//! The element types a safetensors header can name.
//!
//! A closed list, the one of the `safetensors` crate 0.8, which a test compares it with: a new type upstream fails that
//! test, not a user's load. Types are only names and widths here; what they mean numerically is the consumer's affair,
//! because Penstock moves bytes and never converts them on the way in.

use std::fmt;

/// The type of a tensor's elements. Sub-byte types are packed, so a tensor of them may end within a byte: such a tensor
/// is malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Dtype {
    /// Boolean, one byte each.
    Bool,
    /// 4-bit float of the OCP microscaling formats (two to a byte).
    F4,
    /// 6-bit float, 2 exponent and 3 mantissa bits.
    F6E2M3,
    /// 6-bit float, 3 exponent and 2 mantissa bits.
    F6E3M2,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8E5M2,
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite and NaN only.
    F8E4M3,
    /// 8-bit power of two: the scale type of the microscaling formats.
    F8E8M0,
    /// 8-bit float E4M3 without negative zero (AMD MI300).
    F8E4M3Fnuz,
    /// 8-bit float E5M2 without negative zero (AMD MI300).
    F8E5M2Fnuz,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// IEEE half precision.
    F16,
    /// Brain float: the upper half of an `F32`.
    Bf16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// IEEE single precision.
    F32,
    /// Complex number of two `F32`.
    C64,
    /// IEEE double precision.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
}

impl Dtype {
    /// Every type, in the order of the safetensors crate (by alignment).
    pub const ALL: [Self; 22] = [
        Self::Bool,
        Self::F4,
        Self::F6E2M3,
        Self::F6E3M2,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::F8E8M0,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// The header's spelling: `"BF16"`, `"F8_E4M3"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::F4 => "F4",
            Self::F6E2M3 => "F6_E2M3",
            Self::F6E3M2 => "F6_E3M2",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
        }
    }

    /// Bits of one element.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
        }
    }

    /// The type of that exact spelling; case matters, as in the format.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream(name: &str) -> serde_json::Result<safetensors::Dtype> {
        serde_json::from_value(serde_json::Value::String(name.into()))
    }

    /// The crate has no list of its own, but refuses an unknown type by listing those it knows.
    fn upstream_names() -> Vec<String> {
        let refusal = upstream("no such type").unwrap_err().to_string();
        let (_, list) = refusal.split_once("expected one of ").expect("serde lists the variants");
        list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn the_list_is_that_of_the_safetensors_crate() {
        let ours: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.name().to_owned()).collect();
        assert_eq!(ours, upstream_names());
    }

    #[test]
    fn widths_are_those_of_the_safetensors_crate() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.bits(), upstream(dtype.name()).unwrap().bitsize() as u64, "{dtype}");
        }
    }

    #[test]
    fn names_lead_back_to_their_types() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::from_name("bf16"), None);
    }
}
