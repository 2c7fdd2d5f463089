//! What a file that is no safetensors file is instead.
//!
//! A pointer left by a clone without Git LFS, a login page saved under a model's name, a pickle that was renamed: each
//! shows up as a nonsensical header length. This turns the first bytes of such a file into a sentence that says what
//! was met and what to do. It is asked only once reading has failed: no prefix here is proof, since the first eight
//! bytes of a safetensors file are a number.

use crate::error::{Error, ErrorKind};

/// How a format begins, what to call it, what to do.
type Signature = (&'static [u8], &'static str, &'static str);

const PICKLE: &str =
    "Load it with torch and save it with safetensors.torch.save_file, or fetch the safetensors version";
const PAGE: &str =
    "The download saved an error or login page: check the URL and the access token, and download again";

const SIGNATURES: &[Signature] = &[
    (
        b"version https://git-lfs",
        "a Git LFS pointer, which stands for a file that was not fetched",
        "Run `git lfs pull` in the repository, or download the file itself",
    ),
    (b"PK\x03\x04", "a zip archive, such as torch.save writes", PICKLE),
    (b"\x80\x02", "a Python pickle, such as torch.save writes", PICKLE),
    (b"\x80\x04", "a Python pickle", PICKLE),
    (
        b"GGUF",
        "a GGUF file",
        "Penstock reads safetensors: use llama.cpp, or fetch the safetensors version of the model",
    ),
    (b"GGML", "a GGML file", "Penstock reads safetensors: fetch the safetensors version of the model"),
    (b"\x89HDF\r\n", "an HDF5 file, such as Keras writes", "Convert it with the framework that wrote it"),
    (b"\x93NUMPY", "a NumPy file", "Load it with numpy.load and save it with safetensors.numpy.save_file"),
    (b"\x1f\x8b", "gzip data", "Unpack it with `gunzip` first"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "Unpack it with `zstd -d` first"),
    (b"<!doctype", "an HTML page", PAGE),
    (b"<html", "an HTML page", PAGE),
    (b"<?xml", "an XML document", PAGE),
    (b"<error", "an XML error document", PAGE),
    (
        b"{",
        "JSON text",
        "If it is a shard index, its name must end in .safetensors.index.json; if it is a model's configuration, name \
         its directory; if it is an error message, download the file again",
    ),
];

/// Whether something begins as a web page does.
pub(super) fn is_web_page(prefix: &[u8]) -> bool {
    let text = prefix.trim_ascii_start();
    let starts = |begin: &str| {
        text.get(..begin.len()).is_some_and(|start| start.eq_ignore_ascii_case(begin.as_bytes()))
    };
    starts("<!doctype") || starts("<html")
}

/// The better explanation of a failure to find a header at the start of `prefix`, where its first bytes give one.
pub(super) fn explain(prefix: &[u8]) -> Option<Error> {
    let text = prefix.trim_ascii_start();
    let starts = |begin: &[u8]| {
        let bytes = if begin[0] == b'<' || begin[0] == b'{' { text } else { prefix };
        bytes.get(..begin.len()).is_some_and(|start| start.eq_ignore_ascii_case(begin))
    };
    let (_, what, remedy) = SIGNATURES.iter().find(|(begin, ..)| starts(begin))?;
    Some(
        Error::new(ErrorKind::Format, format!("this is not a safetensors file but looks like {what}"))
            .remedy(*remedy),
    )
}
