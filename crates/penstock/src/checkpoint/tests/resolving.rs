//! From what the user typed to the objects.

use super::super::testing::{Files, PlainStore};
use super::super::{Resolved, resolve};
use crate::error::{Error, ErrorKind, Result};

fn try_resolve(inputs: &[&str]) -> Result<Resolved> {
    let inputs: Vec<_> = inputs.iter().map(|input| input.to_string()).collect();
    resolve(&PlainStore::default(), &inputs)
}

/// The objects that `inputs` name, relative to the directory of `files`.
fn objects(files: &Files, inputs: &[&str]) -> Vec<String> {
    let root = files.path("") + "/";
    let strip = |location: String| location.strip_prefix(&root).unwrap_or(&location).to_owned();
    try_resolve(inputs).unwrap().objects.into_iter().map(strip).collect()
}

#[track_caller]
fn refused(input: &str, parts: &[&str]) -> Error {
    let error = try_resolve(&[input]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{error}");
    }
    error
}

#[test]
fn a_file_and_several_each_once() {
    let files = Files::new();
    let (b, a) = (files.weights("b.safetensors", &[]), files.weights("a.safetensors", &[]));
    assert_eq!(objects(&files, &[&b]), ["b.safetensors"]);
    assert_eq!(objects(&files, &[&b, &a, &b]), ["b.safetensors", "a.safetensors"]);
}

#[test]
fn a_file_url() {
    let files = Files::new();
    let path = files.weights("a b.safetensors", &[]);
    assert_eq!(objects(&files, &[&format!("file://{}", path.replace(' ', "%20"))]), ["a b.safetensors"]);
}

#[test]
fn nothing_given() {
    assert_eq!(try_resolve(&[]).unwrap_err().kind(), ErrorKind::NotFound);
    refused("", &["Give the path"]);
}

#[test]
fn a_directory_without_index_means_all_weights_in_it() {
    let files = Files::new();
    for name in ["b.safetensors", "a.safetensors", "config.json", "._a.safetensors", "sub/c.safetensors"] {
        files.weights(name, &[]);
    }
    assert_eq!(objects(&files, &[&files.path("")]), ["a.safetensors", "b.safetensors"]);
}

#[test]
fn consolidated_weights_count_only_where_they_are_alone() {
    let files = Files::new();
    files.weights("consolidated.safetensors", &[]);
    assert_eq!(objects(&files, &[&files.path("")]), ["consolidated.safetensors"]);
    files.weights("model.safetensors", &[]);
    assert_eq!(objects(&files, &[&files.path("")]), ["model.safetensors"]);
    assert_eq!(objects(&files, &[&files.path("*.safetensors")]), ["model.safetensors"]);
    let named = files.path("consolidated.safetensors");
    assert_eq!(objects(&files, &[&named]), ["consolidated.safetensors"]);
}

#[test]
fn an_index_in_a_directory_decides() {
    let files = Files::new();
    files.weights("stray.safetensors", &[]);
    files.index("any.safetensors.index.json", &[("a", "any-1.safetensors")]);
    assert_eq!(objects(&files, &[&files.path("")]), ["any-1.safetensors"]);
    files.index("diffusion_pytorch_model.safetensors.index.json", &[("a", "d-1.safetensors")]);
    assert_eq!(objects(&files, &[&files.path("")]), ["d-1.safetensors"]);
    files.index("model.safetensors.index.json", &[("b", "m-2.safetensors"), ("a", "sub/m-1.safetensors")]);
    assert_eq!(objects(&files, &[&files.path("")]), ["m-2.safetensors", "sub/m-1.safetensors"]);
}

#[test]
fn several_unusual_indexes_are_ambiguous() {
    let files = Files::new();
    files.index("x.safetensors.index.json", &[("a", "x.safetensors")]);
    files.index("y.safetensors.index.json", &[("a", "y.safetensors")]);
    refused(&files.path(""), &["x.safetensors.index.json, y.safetensors.index.json", "Name the one"]);
}

#[test]
fn an_index_given_directly() {
    let files = Files::new();
    let index = files.index("m.safetensors.index.json", &[("a", "2.safetensors"), ("b", "1.safetensors")]);
    let resolved = try_resolve(&[&index, &index]).unwrap();
    assert_eq!(resolved.objects, [files.path("1.safetensors"), files.path("2.safetensors")]);
    assert_eq!((resolved.indexes.len(), &resolved.indexes[0].objects[..]), (1, &[0, 1][..]));
}

#[test]
fn an_index_of_a_variant_given_directly() {
    let files = Files::new();
    files.weights("m.safetensors", &[]);
    let index = files.index("m.safetensors.index.fp16.json", &[("a", "m.fp16-1.safetensors")]);
    assert_eq!(objects(&files, &[&index]), ["m.fp16-1.safetensors"]);
}

#[test]
fn a_malformed_index_is_named() {
    let files = Files::new();
    let index = files.index("m.safetensors.index.json", &[("a", "../2.safetensors")]);
    let error = try_resolve(&[&index]).unwrap_err();
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::Format, Some(&*index)));
}

#[test]
fn globs() {
    let files = Files::new();
    for name in ["m-2.safetensors", "m-1.safetensors", "m-1.json", ".m-3.safetensors", "n.safetensors"] {
        files.weights(name, &[]);
    }
    assert_eq!(objects(&files, &[&files.path("m-*")]), ["m-1.safetensors", "m-2.safetensors"]);
    assert_eq!(objects(&files, &[&files.path("m-[12].safetensors")]), ["m-1.safetensors", "m-2.safetensors"]);
    assert_eq!(objects(&files, &[&files.path("?.safetensors")]), ["n.safetensors"]);
    refused(&files.path("x*"), &["no file matches"]);
    refused(&files.path("m[*"), &["not a valid pattern"]);
}

#[test]
fn a_file_named_like_a_glob_is_itself() {
    let files = Files::new();
    files.weights("m1.safetensors", &[]);
    let path = files.weights("m[1].safetensors", &[]);
    assert_eq!(objects(&files, &[&path]), ["m[1].safetensors"]);
}

#[test]
fn a_glob_that_matches_one_directory_means_it() {
    let files = Files::new();
    files.weights("snap-1/model.safetensors", &[]);
    assert_eq!(objects(&files, &[&files.path("snap-*")]), ["snap-1/model.safetensors"]);
    files.weights("snap-2/model.safetensors", &[]);
    refused(&files.path("snap-*"), &["none of the 2 names"]);
}

#[test]
fn a_directory_without_weights_says_what_it_holds() {
    let files = Files::new();
    let root = files.path("");
    refused(&root, &["the directory is empty"]);
    files.write("pytorch_model.bin", "x");
    refused(&root, &["holds pytorch_model.bin", "save_pretrained"]);
    files.write("model.safetensors.incomplete", "x");
    files.weights("vae/model.safetensors", &[]);
    refused(&root, &["A download is under way", "and the directories vae"]);
    (0..20).for_each(|i| drop(files.write(&format!("f{i}"), "")));
    refused(&root, &["and 14 more"]);
}

#[test]
fn a_missing_file_says_what_is_beside_it() {
    let files = Files::new();
    let missing = files.path("model.safetensors");
    refused(&missing, &["no such file", "Check the path"]);
    files.weights("model-00001-of-00002.safetensors", &[]);
    let error = refused(&missing, &["its directory holds model-00001-of-00002.safetensors"]);
    assert_eq!(error.object_name(), Some(&*missing));
    refused("~/model", &["give the full path"]);
    refused("no-such-org/model", &["hf://no-such-org/model"]);
    refused("/no/such/directory/model", &["does not exist either"]);
    let error = refused("", &["the location is empty", "Give the path"]);
    assert_eq!(error.object_name(), None);
}
