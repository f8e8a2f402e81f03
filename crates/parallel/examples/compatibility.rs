//! Prints `docs/compatibility.md`.

fn main() {
    print!("{}", phalanx_parallel::compatibility_markdown());
}
