//! `docs/config.md` is what the declarations say.

use std::collections::BTreeSet;

use phalanx_config::foreign::{ALIASES, FAMILIES, HARMLESS, UNSUPPORTED};
use phalanx_config::{Config, reference_page};

#[test]
fn the_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == reference_page(),
        "docs/config.md is not what the declarations say; write it anew:\n\
         cargo run -p phalanx-config --example config_page > docs/config.md"
    );
}

#[test]
fn no_key_is_in_two_classes() {
    let mut seen = BTreeSet::new();
    let ours = Config::keys();
    let all = ours.iter().map(|k| k.key);
    let all = all.chain(UNSUPPORTED.iter().map(|u| u.key)).chain(HARMLESS.iter().map(|h| h.key));
    for key in all.chain(ALIASES.iter().map(|a| a.0)) {
        assert!(seen.insert(key), "`{key}` stands in two tables");
    }
    for key in &ours {
        assert!(!FAMILIES.iter().any(|(prefix, _)| key.key.starts_with(prefix)), "{}", key.key);
        assert!(!key.doc.trim().is_empty() && !key.expects.is_empty(), "{}", key.key);
    }
}

#[test]
fn every_default_is_a_value_its_key_accepts() {
    for key in Config::keys() {
        // A key may need another one beside it; what matters here is that its own type takes the default.
        let text = format!("{}: {}\n", key.key, key.default);
        if let Err(e) = Config::parse(&text, "default.yaml", &[]) {
            panic!("{e}");
        }
    }
}
