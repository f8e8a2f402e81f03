//! Prints stories of the demo's corpus: `cargo run -p phalanx-demo --example stories [COUNT [SEED]]`.

fn main() -> phalanx_demo::Result<()> {
    let mut args = std::env::args().skip(1).filter_map(|a| a.parse::<u64>().ok());
    let (count, seed) = (args.next().unwrap_or(5), args.next().unwrap_or(42));
    for story in phalanx_demo::corpus::stories(seed, count as usize)? {
        println!("{story}\n\n----\n");
    }
    Ok(())
}
