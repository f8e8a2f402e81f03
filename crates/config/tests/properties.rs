//! No text makes loading panic, and what it accepts survives a round trip.

use phalanx_config::{Config, parse_overrides};
use proptest::prelude::*;

fn any_key() -> impl Strategy<Value = String> {
    let keys: Vec<String> = Config::keys().iter().map(|k| k.key.to_owned()).collect();
    prop_oneof![4 => proptest::sample::select(keys), 1 => "[a-z_]{1,12}"]
}

fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        "-?[0-9]{1,4}(\\.[0-9]{1,3})?(e-?[0-9])?",
        "true|false|null|no|steps|epoch|cosine|wsd|lora|full|freeze|all",
        "[a-z/_.,-]{0,12}",
        "\\[[a-z0-9]{1,3}(, [a-z0-9]{1,3}){0,2}\\]",
        "\\{(min_lr|num_cycles|a): [0-9]{1,2}\\}",
        "\"[^\"\\\\\n]{0,8}\"",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_loaded_or_refused(text in "(?s).{0,80}") {
        let _ = Config::parse(&text, "any", &[]);
    }

    #[test]
    fn text_that_looks_like_yaml(text in "([ \t]{0,4}[-?:a-z0-9&*!|>'\"{}\\[\\],#%@`~<=]{0,8}\n?){0,12}") {
        let _ = Config::parse(&text, "any", &[]);
    }

    #[test]
    fn accepted_files_survive_a_round_trip(pairs in proptest::collection::vec((any_key(), any_value()), 1..5)) {
        let text: String = pairs.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
        if let Ok(config) = Config::parse(&text, "any", &[]) {
            let again = Config::parse(&config.to_yaml(), "again", &[]).unwrap();
            prop_assert_eq!(again.to_json(), config.to_json());
        }
    }

    #[test]
    fn a_file_and_the_command_line_agree(pairs in proptest::collection::vec((any_key(), any_value()), 1..5)) {
        let text: String = pairs.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
        let args: Vec<_> = pairs.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let on_line = parse_overrides(&args).and_then(|o| Config::from_overrides(&o));
        match (Config::parse(&text, "any", &[]), on_line) {
            (Ok(file), Ok(line)) => {
                // Nothing after the colon is an empty list or no value; nothing after `=` is the default, which may be another.
                if pairs.iter().all(|(_, v)| !v.trim().is_empty()) {
                    prop_assert_eq!(file.to_json(), line.to_json());
                }
            }
            (Err(_), Ok(_)) => {
                // In a file a key may stand once, and nothing after the colon is null; on the line the last one wins,
                // and nothing after `=` is the default.
                let twice = pairs.iter().enumerate().any(|(i, a)| pairs[..i].iter().any(|b| a.0 == b.0));
                let empty = pairs.iter().any(|(_, v)| v.trim().is_empty());
                let odd = pairs.iter().any(|(_, v)| Config::parse(&format!("default_system: {v}\n"), "any", &[]).is_err());
                prop_assert!(twice || empty || odd, "{}", text);
            }
            (Ok(_), Err(e)) => {
                let empty = pairs.iter().any(|(_, v)| v.trim().is_empty());
                prop_assert!(empty, "{}\n{}", text, e);
            }
            (Err(_), Err(_)) => {}
        }
    }
}
