//! How fast loads are planned: few large tensors, many small ones, one of 12 GB, and a column slice of many rows.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use penstock::checkpoint::{Dtype, TensorInfo};
use penstock::plan::{Layout, Plan, Selection};

const BLOCK: u64 = 2 << 20;

fn tensors(count: u64, rows: u64, columns: u64) -> Vec<TensorInfo> {
    let bytes = rows * columns * 2;
    (0..count)
        .map(|i| TensorInfo {
            name: format!("model.layers.{i}.weight").into(),
            dtype: Dtype::Bf16,
            shape: vec![rows, columns],
            object: 0,
            range: i * bytes..(i + 1) * bytes,
        })
        .collect()
}

fn plans(c: &mut Criterion) {
    for (what, tensors) in [
        ("291 tensors of 55 MB", tensors(291, 6700, 4096)),
        ("100,000 tensors of 16 KiB", tensors(100_000, 128, 64)),
        ("one tensor of 12 GB", tensors(1, 1_464_843, 4096)),
    ] {
        c.bench_function(&format!("plan {what}"), |b| {
            b.iter(|| {
                let wanted = tensors.iter().map(|tensor| (tensor, Selection::all(tensor))).collect();
                let plan = Plan::new(black_box(wanted), BLOCK, 64 << 10);
                Layout::of(&plan).bytes()
            });
        });
    }
    let wide = tensors(1, 65_536, 4096);
    c.bench_function("plan half of the columns of 65,536 rows", |b| {
        b.iter(|| {
            let half = [0..65_536, 0..2048];
            let selection = Selection::of(&wide[0], black_box(&half)).map(|selection| (&wide[0], selection));
            Plan::new(selection.into_iter().collect(), BLOCK, 64 << 10).blocks().len()
        });
    });
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20); targets = plans }
criterion_main!(benches);
