//! Prints `docs/config.md`.

fn main() {
    print!("{}", phalanx_config::reference_page());
}
