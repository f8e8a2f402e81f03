//! How keys are declared: [`section!`] for a group of keys, [`choice!`] for a key with a few allowed words.
//!
//! A declaration is the only place where a key's name, type, default and explanation stand; reading, printing,
//! the reference page and the typing-mistake search all come from it.

use serde_json::Value as Json;

use crate::error::Result;
use crate::nearest::nearest;
use crate::node::Node;
use crate::value::ValueError;

/// What is known about a key: one row of `docs/config.md`.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyInfo {
    /// The key.
    pub key: &'static str,
    /// Title of its section.
    pub section: &'static str,
    /// What may be written, in words.
    pub expects: String,
    /// Its default.
    pub default: Json,
    /// Its explanation, Markdown.
    pub doc: &'static str,
}

/// A group of keys; made by [`section!`].
pub trait Section: Default {
    /// Title for people.
    const TITLE: &'static str;
    /// The keys, in the order of their declaration.
    fn keys() -> Vec<KeyInfo>;
    /// Reads `node` into the field `key`; `None` when the section has no such key.
    fn set(&mut self, key: &str, node: &Node) -> Option<Result<(), ValueError>>;
    /// Each key with its present value.
    fn values(&self) -> Vec<(&'static str, Json)>;

    /// Reads a whole map, for sections that are the value of a key (`lr_scheduler_kwargs`).
    ///
    /// # Errors
    /// The first key that is unknown or does not fit, with its place.
    fn from_map(node: &Node) -> Result<Self, ValueError> {
        let mut section = Self::default();
        let entries = node.entries().ok_or_else(|| ValueError::wrong(node, "a map"))?;
        for entry in entries {
            match section.set(&entry.key, &entry.value) {
                Some(Ok(())) => {}
                Some(Err(e)) => return Err(ValueError { sub_key: entry.key.clone(), ..e }),
                None => {
                    let known: Vec<_> = Self::keys().iter().map(|k| k.key).collect();
                    let mend = match nearest(&entry.key, known.iter().copied()) {
                        Some(near) => format!("did you mean `{near}`?"),
                        None => format!("known keys: {}", known.join(", ")),
                    };
                    return Err(ValueError {
                        line: entry.line,
                        col: entry.col,
                        sub_key: entry.key.clone(),
                        what: "unknown key".into(),
                        mend,
                    });
                }
            }
        }
        Ok(section)
    }
}

/// Declares a section: a struct of documented, public fields, each with its default, and its [`Section`] impl.
macro_rules! section {
    (
        $(#[doc = $about:literal])+
        pub struct $Name:ident, $title:literal {
            $( $(#[doc = $doc:literal])+ pub $key:ident: $ty:ty = $default:expr, )*
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq)]
        pub struct $Name {
            $( $(#[doc = $doc])+ pub $key: $ty, )*
        }

        impl Default for $Name {
            fn default() -> Self {
                Self { $( $key: $default, )* }
            }
        }

        impl $crate::schema::Section for $Name {
            const TITLE: &'static str = $title;

            fn keys() -> Vec<$crate::schema::KeyInfo> {
                let defaults = Self::default();
                vec![$( $crate::schema::KeyInfo {
                    key: stringify!($key),
                    section: $title,
                    expects: <$ty as $crate::value::FromNode>::expects(),
                    default: $crate::value::FromNode::to_json(&defaults.$key),
                    doc: concat!($($doc, "\n"),+),
                }, )*]
            }

            fn set(&mut self, key: &str, node: &$crate::node::Node) -> Option<Result<(), $crate::value::ValueError>> {
                match key {
                    $( stringify!($key) => {
                        Some($crate::value::FromNode::from_node(node).map(|value| self.$key = value))
                    } )*
                    _ => None,
                }
            }

            fn values(&self) -> Vec<(&'static str, serde_json::Value)> {
                vec![$( (stringify!($key), $crate::value::FromNode::to_json(&self.$key)), )*]
            }
        }
    };
}
pub(crate) use section;

/// Declares an enum whose values are words of the configuration, with other spellings, and with the words that
/// LlamaFactory knows but that are refused here, each with what to do instead.
macro_rules! choice {
    (
        $(#[doc = $about:literal])+
        pub enum $Name:ident {
            $( $(#[doc = $doc:literal])+ $Variant:ident = $word:literal $(| $alias:literal)*, )+
        }
        $( refused { $( $($no:literal)|+ => $instead:expr, )+ } )?
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $Name {
            $( $(#[doc = $doc])+ $Variant, )+
        }

        impl $Name {
            /// The word in a configuration.
            pub fn as_str(self) -> &'static str {
                match self { $( Self::$Variant => $word, )+ }
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl $crate::value::FromNode for $Name {
            fn expects() -> String {
                format!("one of: {}", [$( $word ),+].join(", "))
            }

            fn from_node(node: &$crate::node::Node) -> Result<Self, $crate::value::ValueError> {
                use $crate::value::ValueError;
                match node.text() {
                    $( Some($word $(| $alias)*) => return Ok(Self::$Variant), )+
                    $( $( Some(word) if matches!(word, $($no)|+) => {
                        return Err(ValueError::new(node, format!("`{word}` is not supported"), $instead));
                    } )+ )?
                    _ => {}
                }
                let near = node.text().and_then(|t| $crate::nearest::nearest(t, [$( $word ),+]));
                let mut error = ValueError::wrong(node, &Self::expects());
                if let Some(near) = near {
                    error.mend = format!("did you mean `{near}`?");
                }
                Err(error)
            }

            fn to_json(&self) -> serde_json::Value {
                self.as_str().into()
            }
        }
    };
}
pub(crate) use choice;
