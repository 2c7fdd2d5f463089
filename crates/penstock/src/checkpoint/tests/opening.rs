//! The catalogue: what it holds, and what it refuses.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::testing::{Files, PlainStore, weights};
use super::super::{Checkpoint, Dtype, TensorInfo};
use crate::error::{Error, ErrorKind, Result};

fn try_open(inputs: &[&str]) -> Result<Checkpoint> {
    let inputs: Vec<_> = inputs.iter().map(|input| input.to_string()).collect();
    Checkpoint::open(Arc::new(PlainStore::default()), &inputs)
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().iter().map(|tensor| &*tensor.name).collect()
}

#[track_caller]
fn refused(input: &str, kind: ErrorKind, parts: &[&str]) -> Error {
    let error = try_open(&[input]).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{error}");
    }
    error
}

#[test]
fn one_file() {
    let files = Files::new();
    let path = files.weights("m.safetensors", &["a", "b"]);
    let checkpoint = try_open(&[&path]).unwrap();
    let object = &checkpoint.objects()[0];
    let start = object.data_start;
    assert_eq!((&*object.location, object.bytes, checkpoint.bytes()), (&*path, start + 4, 4));
    let b = TensorInfo {
        name: "b".into(),
        dtype: Dtype::U8,
        shape: vec![2],
        object: 0,
        range: start + 2..start + 4,
    };
    assert_eq!((checkpoint.tensor("b"), checkpoint.tensor("c")), (Some(&b), None));
    assert!(format!("{checkpoint:?}").contains("tensors: 2"));
}

#[test]
fn tensors_may_be_taken_for_their_bytes() {
    let files = Files::new();
    let header = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"I64","shape":[0,5],"data_offsets":[24,24]}}"#;
    let length = u64::try_from(header.len()).unwrap().to_le_bytes();
    let path = files.write("m.safetensors", [&length, header.as_bytes(), &[7; 24]].concat());
    let checkpoint = try_open(&[&path]).unwrap();
    let flat = checkpoint.as_bytes();
    let described: Vec<_> = flat.tensors().iter().map(|tensor| (&*tensor.name, &*tensor.shape)).collect();
    assert_eq!(described, [("a", &[24][..]), ("b", &[0][..])]);
    for (bytes, tensor) in flat.tensors().iter().zip(checkpoint.tensors()) {
        assert_eq!((bytes.dtype, &bytes.range), (Dtype::U8, &tensor.range));
    }
    assert_eq!(flat.objects(), checkpoint.objects(), "the version is the same");
}

#[test]
fn a_short_header_costs_one_read_and_a_long_one_two() {
    let files = Files::new();
    let short = files.weights("short.safetensors", &["a"]);
    let padding = format!(r#""__metadata__":{{"x":"{}"}}"#, "y".repeat(300 << 10));
    let long = files.write("long.safetensors", weights(&["b"], &padding));
    let store = Arc::new(PlainStore::default());
    Checkpoint::open(store.clone(), &[short]).unwrap();
    assert_eq!(store.reads.swap(0, Ordering::Relaxed), 1);
    let checkpoint = Checkpoint::open(store.clone(), &[long]).unwrap();
    assert_eq!(store.reads.load(Ordering::Relaxed), 2);
    assert_eq!(checkpoint.metadata()["x"].len(), 300 << 10);
}

#[test]
fn a_header_cut_off_behind_the_first_read_is_refused() {
    let files = Files::new();
    let padding = format!(r#""__metadata__":{{"x":"{}"}}"#, "y".repeat(300 << 10));
    let mut bytes = weights(&["b"], &padding);
    bytes.truncate(290 << 10);
    let path = files.write("long.safetensors", bytes);
    let error = refused(&path, ErrorKind::Format, &["incomplete", "Download it again"]);
    assert_eq!(error.object_name(), Some(&*path));
}

#[test]
fn many_files_come_in_order() {
    let files = Files::new();
    for i in 0..40 {
        files.weights(&format!("m-{i:02}.safetensors"), &[&format!("t{i:02}a"), &format!("t{i:02}b")]);
    }
    let checkpoint = try_open(&[&files.path("")]).unwrap();
    assert_eq!((checkpoint.objects().len(), checkpoint.bytes()), (40, 160));
    assert!(names(&checkpoint).is_sorted());
    assert!(checkpoint.tensors().iter().map(|tensor| tensor.object).is_sorted());
}

#[test]
fn the_first_faulty_file_is_reported_every_time() {
    let files = Files::new();
    for i in 0..40 {
        let name = format!("m-{i:02}.safetensors");
        if i >= 11 {
            files.write(&name, "")
        } else {
            files.weights(&name, &[&name])
        };
    }
    for _ in 0..20 {
        let error = refused(&files.path(""), ErrorKind::Format, &["the file is empty"]);
        assert_eq!(error.object_name(), Some(&*files.path("m-11.safetensors")));
    }
}

#[test]
fn a_name_in_two_files_is_refused() {
    let files = Files::new();
    let (a, b) = (files.weights("a.safetensors", &["x", "t"]), files.weights("b.safetensors", &["t"]));
    let error = refused(&files.path(""), ErrorKind::Format, &[&a, &b]);
    assert_eq!(error.tensor_name(), Some("t"));
}

#[test]
fn metadata_is_merged_and_the_first_object_wins() {
    let files = Files::new();
    let header = |text: &str| format!(r#""__metadata__":{{{text}}}"#);
    files.write("a.safetensors", weights(&[], &header(r#""format":"pt","a":"1""#)));
    files.write("b.safetensors", weights(&[], &header(r#""format":"np","b":"2""#)));
    let checkpoint = try_open(&[&files.path("")]).unwrap();
    let merged = [("format", "pt"), ("a", "1"), ("b", "2")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    assert_eq!(*checkpoint.metadata(), merged.into());
    assert_eq!(checkpoint.objects()[1].metadata["format"], "np");
}

#[test]
fn the_index_decides_what_belongs() {
    let files = Files::new();
    files.weights("1.safetensors", &["a", "moved", "unmapped"]);
    files.weights("2.safetensors", &["b", "moved"]);
    files.weights("3.safetensors", &["a"]);
    files.index(
        "model.safetensors.index.json",
        &[("a", "1.safetensors"), ("b", "2.safetensors"), ("moved", "2.safetensors")],
    );
    let checkpoint = try_open(&[&files.path("")]).unwrap();
    assert_eq!(names(&checkpoint), ["a", "b", "moved"]);
    assert_eq!(checkpoint.tensor("moved").unwrap().object, 1);
}

#[test]
fn a_tensor_that_is_not_in_its_shard_is_refused() {
    let files = Files::new();
    files.weights("1.safetensors", &["a", "b"]);
    files.weights("2.safetensors", &["c"]);
    let index = files.index(
        "model.safetensors.index.json",
        &[("a", "1.safetensors"), ("b", "2.safetensors"), ("c", "2.safetensors")],
    );
    let error = refused(&index, ErrorKind::Format, &["\"2.safetensors\", which does not hold it"]);
    assert_eq!((error.object_name(), error.tensor_name()), (Some(&*index), Some("b")));
}

#[test]
fn a_missing_shard_is_named_with_its_index_and_a_tensor() {
    let files = Files::new();
    files.weights("1.safetensors", &["a"]);
    let index =
        files.index("model.safetensors.index.json", &[("a", "1.safetensors"), ("b", "2.safetensors")]);
    let error = refused(&index, ErrorKind::NotFound, &[&index, "the shard is missing", "incomplete"]);
    assert_eq!((error.object_name(), error.tensor_name()), (Some(&*files.path("2.safetensors")), Some("b")));
}

#[test]
fn two_models_side_by_side() {
    let files = Files::new();
    files.weights("x/1.safetensors", &["a", "same"]);
    let index = files.index("x/model.safetensors.index.json", &[("a", "1.safetensors")]);
    let plain = files.weights("y.safetensors", &["same"]);
    let checkpoint = try_open(&[&plain, &index]).unwrap();
    assert_eq!(names(&checkpoint), ["same", "a"]);
}

#[test]
fn a_wrong_name_is_answered_with_likely_ones() {
    let files = Files::new();
    let path = files.weights("m.safetensors", &["model.norm.weight", "lm_head.weight"]);
    let checkpoint = try_open(&[&path]).unwrap();
    let error = checkpoint.require("norm.weight").unwrap_err();
    assert_eq!((error.kind(), error.tensor_name()), (ErrorKind::TensorNotFound, Some("norm.weight")));
    assert!(error.to_string().contains("Did you mean \"model.norm.weight\"?"), "{error}");
    let error = checkpoint.require("transformer.h.0.attn").unwrap_err();
    assert!(error.to_string().contains("None of the 2 names is like it"), "{error}");
    assert!(checkpoint.require("lm_head.weight").is_ok());
}
