//! Reading a layout text.
//!
//! ```text
//! layout = item+
//! item   = ( "E" | "t" | "L" | "|" | "(" layout ")" ) [ "*" number ]
//! ```
//! Commas and spaces may stand anywhere. This is what Megatron-LM accepts, and nesting besides.

/// A split of layers that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Numbers that do not fit each other; what and the mend.
    #[error("layers: {0}")]
    Numbers(String),
    /// A layout text.
    #[error("layout \"{text}\": column {column}: {what}", text = shortened(text))]
    Text {
        /// As written.
        text: String,
        /// Where, in characters from 1.
        column: usize,
        /// What is wrong there and what would be right.
        what: String,
    },
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// One piece of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Embedding,
    Layer,
    Head,
    /// From one stage to the next.
    Next,
}

/// How deep parentheses may nest.
const DEEPEST: usize = 32;

/// All items, written out, each with the column it comes from.
pub(super) fn read(text: &str, most: usize) -> Result<Vec<(Item, usize)>, LayoutError> {
    let chars: Vec<char> = text.chars().collect();
    let fail = |at: usize, what: String| LayoutError::Text { text: text.into(), column: at + 1, what };
    // Open parentheses, with what stands before them; the items of the innermost.
    let mut open: Vec<(Vec<(Item, usize)>, usize)> = vec![];
    let mut items: Vec<(Item, usize)> = vec![];
    // What a * would repeat: from here to the end of `items`.
    let mut last: Option<usize> = None;
    let mut i = 0;
    while i < chars.len() {
        let single = match chars[i] {
            'E' => Some(Item::Embedding),
            't' => Some(Item::Layer),
            'L' => Some(Item::Head),
            '|' => Some(Item::Next),
            _ => None,
        };
        match chars[i] {
            ',' | ' ' => {}
            '(' => {
                if open.len() == DEEPEST {
                    return Err(fail(i, format!("parentheses nest more than {DEEPEST} deep")));
                }
                open.push((std::mem::take(&mut items), i));
                last = None;
            }
            ')' => {
                let Some((mut outer, _)) = open.pop() else { return Err(fail(i, "a ) without its (".into())) };
                if items.is_empty() {
                    return Err(fail(i, "nothing between ( and )".into()));
                }
                last = Some(outer.len());
                outer.append(&mut items);
                items = outer;
            }
            '*' => {
                let Some(from) = last.take() else {
                    return Err(fail(i, "* repeats the letter or parenthesis before it, and there is none".into()));
                };
                let start = i + 1;
                while i + 1 < chars.len() && chars[i + 1].is_ascii_digit() {
                    i += 1;
                }
                let digits: String = chars[start..=i].iter().collect();
                if digits.is_empty() {
                    return Err(fail(start, "a number is missing after *, as in t*3".into()));
                }
                // Only digits, so that what does not fit is too many.
                let times = digits.parse::<usize>().unwrap_or(usize::MAX);
                if times == 0 {
                    return Err(fail(start, "repeat at least 1 time".into()));
                }
                let group = items[from..].to_vec();
                if group.len().saturating_mul(times).saturating_add(from) > most {
                    return Err(fail(start, format!("that many layers and stages; there are at most {most}")));
                }
                (1..times).for_each(|_| items.extend_from_slice(&group));
            }
            'm' => {
                let what = "m (multi-token prediction) is not supported; take it out, and L stands on its own stage";
                return Err(fail(i, what.into()));
            }
            other => {
                let Some(item) = single else {
                    let what = format!(
                        "\"{other}\" is none of E (embedding), t (a layer), L (head and loss), |, ( ), *, comma"
                    );
                    return Err(fail(i, what));
                };
                last = Some(items.len());
                items.push((item, i + 1));
                if items.len() > most {
                    return Err(fail(i, format!("that many layers and stages; there are at most {most}")));
                }
            }
        }
        i += 1;
    }
    match open.pop() {
        Some((_, at)) => Err(fail(at, "a ( that is never closed".into())),
        None => Ok(items),
    }
}
