//! How fast headers are parsed and checked: a Llama's 291 tensors, and 100,000 small ones.

use std::fmt::Write;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use penstock::checkpoint::header::parse_object_prefix;

fn file(tensors: u64) -> (Vec<u8>, u64) {
    let mut json = String::from("{");
    for i in 0..tensors {
        let comma = if i == 0 { "" } else { "," };
        let (start, end) = (i * 32_768, (i + 1) * 32_768);
        let _ = write!(
            json,
            r#"{comma}"model.layers.{i}.mlp.down_proj.weight":{{"dtype":"BF16","shape":[128,128],"data_offsets":[{start},{end}]}}"#
        );
    }
    json.push('}');
    let mut prefix = (json.len() as u64).to_le_bytes().to_vec();
    prefix.extend(json.as_bytes());
    let bytes = prefix.len() as u64 + tensors * 32_768;
    (prefix, bytes)
}

fn headers(c: &mut Criterion) {
    for tensors in [291, 100_000] {
        let (prefix, bytes) = file(tensors);
        c.bench_function(&format!("parse a header of {tensors} tensors"), |b| {
            b.iter(|| parse_object_prefix(black_box(&prefix), bytes));
        });
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20); targets = headers }
criterion_main!(benches);
