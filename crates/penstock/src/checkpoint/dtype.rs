//! Element types of the safetensors format.

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// The type of a tensor's elements: every one that version 0.8 of the `safetensors` crate knows.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
        }

        impl Dtype {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name that headers use.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The dtype that headers call `name`.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }

            /// Bits of one element; elements of less than a byte are packed.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    /// A boolean, one byte.
    Bool = "BOOL", 8;
    /// 4-bit float, E2M1, two to a byte.
    F4 = "F4", 4;
    /// 6-bit float, E2M3.
    F6E2M3 = "F6_E2M3", 6;
    /// 6-bit float, E3M2.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// 8-bit float, E5M2.
    F8E5M2 = "F8_E5M2", 8;
    /// 8-bit float, E4M3.
    F8E4M3 = "F8_E4M3", 8;
    /// 8-bit exponent, as scales have it.
    F8E8M0 = "F8_E8M0", 8;
    /// 8-bit float, E4M3 without infinities and negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// 8-bit float, E5M2 without infinities and negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16 = "I16", 16;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16;
    /// Half-precision float.
    F16 = "F16", 16;
    /// Brain float.
    BF16 = "BF16", 16;
    /// Signed 32-bit integer.
    I32 = "I32", 32;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32;
    /// Single-precision float.
    F32 = "F32", 32;
    /// Complex number of two single-precision floats.
    C64 = "C64", 64;
    /// Double-precision float.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The crate's own spelling and size of a dtype of ours, if it has it.
    fn theirs(name: &str) -> Option<safetensors::Dtype> {
        serde_json::from_value(serde_json::Value::String(name.to_owned())).ok()
    }

    #[test]
    fn every_dtype_has_the_name_and_size_that_safetensors_gives_it() {
        for dtype in Dtype::ALL {
            let theirs =
                theirs(dtype.name()).unwrap_or_else(|| panic!("safetensors has no {}", dtype.name()));
            assert_eq!(theirs.bitsize() as u64, dtype.bits(), "{}", dtype.name());
            assert_eq!(Dtype::from_name(dtype.name()), Some(*dtype));
        }
    }

    #[test]
    fn no_dtype_of_safetensors_is_missing() {
        // Its parser lists what it would have taken: "unknown variant `?`, expected one of `BOOL`, `F4`, …".
        let error = serde_json::from_str::<safetensors::Dtype>("\"?\"").unwrap_err().to_string();
        let names: Vec<_> = error.split('`').skip(3).step_by(2).collect();
        assert!(names.len() >= 20, "{error}");
        for name in names {
            assert!(Dtype::from_name(name).is_some(), "{name} is missing");
        }
    }
}
