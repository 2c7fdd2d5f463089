//! Ends a build for another system in one sentence, instead of errors wherever the crate uses Linux.

#![allow(clippy::print_stdout, reason = "this is how cargo is told")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        println!(
            "cargo::error=Penstock runs on Linux only: it reads the page cache's state, and by-passes it, as Linux does. \
             On Windows, use WSL 2"
        );
    }
}
