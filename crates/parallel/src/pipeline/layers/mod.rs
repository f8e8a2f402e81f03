//! Which layers each stage holds.
//!
//! A split that is even in layers is not even in time: the first stage embeds, and the last one makes logits over the whole vocabulary, often
//! as much work as several layers. So there are three ways to say it: evenly, with the two ends weighed; by counts; by a layout text.

mod layout;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use layout::LayoutError;

use layout::Item;

/// The most layers that a model may have here: beyond, a typing mistake in a layout would fill the memory.
const MOST_LAYERS: usize = 1 << 16;

/// How layers are given to stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum LayerSplit {
    /// As evenly as whole layers allow, the embedding counting as `embedding` layers and head and loss as `head` layers (both 0: layers
    /// alone count). Layers that are left over go to the middle, the last stages but one first: early stages hold the most activations,
    /// the last one the head.
    Even {
        /// What the embedding costs, in layers.
        embedding: f64,
        /// What head and loss cost, in layers.
        head: f64,
    },
    /// A count for each stage.
    Counts(Vec<usize>),
    /// A text in the manner of Megatron-LM's `--pipeline-model-parallel-layout`: `E` embedding, `t` a layer, `L` head and loss, `|` between
    /// stages; `t*3` is `ttt`, `(tt|)*2` is `tt|tt|`, also nested; commas and spaces mean nothing. `Et*3|t*4|t*4|t*3L` are four stages of a
    /// model of 14 layers. Stages are numbered from left to right; in a loop (interleaved) the first p of them are the first chunks of the
    /// ranks. `m` (multi-token prediction) is refused, there being no such layer here.
    Layout(String),
}

impl Default for LayerSplit {
    fn default() -> LayerSplit {
        LayerSplit::Even { embedding: 0.0, head: 0.0 }
    }
}

impl LayerSplit {
    /// How many layers a split speaks of: the sum of its counts, the `t` of its layout, at least one a stage if even.
    ///
    /// # Errors
    /// A layout that cannot be read.
    pub fn num_layers(&self, num_stages: usize) -> Result<usize, LayoutError> {
        match self {
            LayerSplit::Even { .. } => Ok(num_stages),
            LayerSplit::Counts(counts) => Ok(counts.iter().fold(0, |sum, &n| sum.saturating_add(n))),
            LayerSplit::Layout(text) => {
                Ok(layout::read(text, MOST_LAYERS)?.iter().filter(|i| i.0 == Item::Layer).count())
            }
        }
    }
}

/// What a stage holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageLayers {
    /// Layers, counted over the whole model.
    pub layers: Range<usize>,
    /// Whether it embeds tokens: the first stage, and no other.
    pub embedding: bool,
    /// Whether it holds head and loss: the last stage, and no other.
    pub head: bool,
}

impl StageLayers {
    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }
}

/// Gives each stage its layers: consecutive, every layer once, the embedding on the first stage, head and loss on the last.
///
/// A stage without layers is allowed at the two ends, where it still holds the embedding or the head, and if it is asked for. In the middle
/// it is refused: it would only hand tensors on, and lengthen the pipeline.
///
/// ```
/// use phalanx_parallel::pipeline::{LayerSplit, split_layers};
/// let counts = |split: &LayerSplit| -> Result<Vec<usize>, Box<dyn std::error::Error>> {
///     Ok(split_layers(14, 4, split)?.iter().map(|s| s.num_layers()).collect())
/// };
/// assert_eq!(counts(&LayerSplit::default())?, [3, 4, 4, 3]);
/// assert_eq!(counts(&LayerSplit::Even { embedding: 0.0, head: 2.0 })?, [4, 4, 4, 2]);
/// assert_eq!(counts(&LayerSplit::Layout("Et*3|(t*4|)*2 t*3,L".into()))?, [3, 4, 4, 3]);
/// let error = counts(&LayerSplit::Layout("Et*3|t*4|x|t*3L".into())).unwrap_err().to_string();
/// assert!(error.contains("column 10"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fewer layers than stages, counts that do not add up, a layout that cannot be read (with the column), an empty stage.
pub fn split_layers(num_layers: usize, num_stages: usize, split: &LayerSplit) -> Result<Vec<StageLayers>, LayoutError> {
    if num_stages == 0 || num_layers == 0 || num_layers > MOST_LAYERS {
        return Err(LayoutError::Numbers(format!(
            "{num_layers} layers in {num_stages} stages; there is at least one of each, and at most {MOST_LAYERS} layers"
        )));
    }
    let counts = match split {
        LayerSplit::Even { embedding, head } => even(num_layers, num_stages, *embedding, *head)?,
        LayerSplit::Counts(counts) => counts.clone(),
        LayerSplit::Layout(text) => layout_counts(text, num_layers, num_stages)?,
    };
    check_counts(&counts, num_layers, num_stages)?;
    let mut first = 0;
    let stages = counts.iter().enumerate().map(|(stage, &n)| {
        first += n;
        StageLayers { layers: first - n..first, embedding: stage == 0, head: stage + 1 == num_stages }
    });
    Ok(stages.collect())
}

fn check_counts(counts: &[usize], num_layers: usize, num_stages: usize) -> Result<(), LayoutError> {
    if counts.len() != num_stages {
        let given = counts.len();
        return Err(LayoutError::Numbers(format!(
            "counts of layers for {given} stages, and there are {num_stages} (ranks × chunks); give one for each"
        )));
    }
    let sum = counts.iter().fold(0_usize, |sum, &n| sum.saturating_add(n));
    if sum != num_layers {
        return Err(LayoutError::Numbers(format!(
            "the stages hold {sum} layers, the model has {num_layers}; give every layer to one stage"
        )));
    }
    let ends = 1..num_stages.saturating_sub(1);
    match ends.into_iter().find(|&s| counts[s] == 0) {
        Some(stage) => Err(LayoutError::Numbers(format!(
            "stage {stage} of {num_stages} would hold nothing and only hand tensors on; take fewer stages, or give it a layer"
        ))),
        None => Ok(()),
    }
}

/// One layer after another to the stage with the least to do.
fn even(num_layers: usize, num_stages: usize, embedding: f64, head: f64) -> Result<Vec<usize>, LayoutError> {
    for (name, cost) in [("embedding", embedding), ("head", head)] {
        if !cost.is_finite() || cost < 0.0 {
            return Err(LayoutError::Numbers(format!("the {name} costs {cost} layers; give 0 or more")));
        }
    }
    if num_layers < num_stages && embedding == 0.0 && head == 0.0 {
        return Err(LayoutError::Numbers(format!(
            "{num_layers} layers do not fill {num_stages} stages (ranks × chunks); take at most {num_layers} stages"
        )));
    }
    // Who comes first among equals: the last but one, then towards the front, the last at last.
    let last = num_stages - 1;
    let order: Vec<usize> = (0..last).rev().chain([last]).collect();
    // All but the first and the last stage begin alike, so layers come in rounds; without rounds it would be layers × stages.
    let mut counts = vec![0_usize; num_stages];
    let load = |counts: &[usize], s: usize| {
        counts[s] as f64 + if s == 0 { embedding } else { 0.0 } + if s == last { head } else { 0.0 }
    };
    let whole = (num_layers / num_stages).saturating_sub((embedding + head).ceil() as usize + 1);
    counts.fill(whole);
    for _ in whole * num_stages..num_layers {
        let least = order.iter().copied().min_by(|&a, &b| load(&counts, a).total_cmp(&load(&counts, b)));
        counts[least.unwrap_or(0)] += 1;
    }
    Ok(counts)
}

/// Counts of a layout text, its `E` and `L` in their places.
fn layout_counts(text: &str, num_layers: usize, num_stages: usize) -> Result<Vec<usize>, LayoutError> {
    let items = layout::read(text, MOST_LAYERS)?;
    let at = |column: usize, what: String| Err(LayoutError::Text { text: text.into(), column, what });
    let mut counts = vec![0];
    let mut empty = true;
    let mut previous = None;
    for (i, &(item, column)) in items.iter().enumerate() {
        match item {
            Item::Embedding if i != 0 => {
                return at(column, "E (the embedding) stands once, at the very beginning".into());
            }
            Item::Head if i + 1 != items.len() => {
                return at(column, "L (head and loss) stands once, at the very end".into());
            }
            Item::Next if empty => {
                let stage = counts.len() - 1;
                return at(column, format!("stage {stage} is empty; take this | away, or give the stage a layer"));
            }
            Item::Next => counts.push(0),
            Item::Layer => {
                if let Some(n) = counts.last_mut() {
                    *n += 1;
                }
            }
            Item::Embedding | Item::Head => {}
        }
        empty = item == Item::Next;
        previous = Some((item, column));
    }
    let end = previous.map_or(1, |(_, column)| column);
    if items.first().is_none_or(|i| i.0 != Item::Embedding) {
        return at(1, "it begins with E, the embedding".into());
    }
    if previous.is_none_or(|i| i.0 != Item::Head) {
        return at(end, "it ends with L, head and loss".into());
    }
    if counts.len() != num_stages {
        let given = counts.len();
        return at(
            end,
            format!("{given} stages, and there are {num_stages} (ranks × chunks); | stands between stages"),
        );
    }
    let sum: usize = counts.iter().sum();
    if sum != num_layers {
        return at(end, format!("{sum} layers, and the model has {num_layers}; each t is one"));
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(n: usize, stages: usize, split: &LayerSplit) -> Vec<usize> {
        let split = split_layers(n, stages, split).unwrap();
        assert_eq!((split[0].layers.start, split[stages - 1].layers.end), (0, n));
        assert!(split.windows(2).all(|w| w[0].layers.end == w[1].layers.start));
        assert!(split.iter().enumerate().all(|(s, l)| l.embedding == (s == 0) && l.head == (s + 1 == stages)));
        split.iter().map(StageLayers::num_layers).collect()
    }

    fn error(n: usize, stages: usize, split: &LayerSplit) -> String {
        split_layers(n, stages, split).unwrap_err().to_string()
    }

    fn layout(text: &str) -> LayerSplit {
        LayerSplit::Layout(text.into())
    }

    #[test]
    fn evenly() {
        let even = |embedding, head| LayerSplit::Even { embedding, head };
        assert_eq!(counts(8, 4, &even(0.0, 0.0)), [2, 2, 2, 2]);
        assert_eq!(counts(9, 4, &even(0.0, 0.0)), [2, 2, 3, 2]);
        assert_eq!(counts(11, 4, &even(0.0, 0.0)), [3, 3, 3, 2]);
        assert_eq!(counts(5, 1, &even(1.0, 3.0)), [5]);
        assert_eq!(counts(30, 4, &even(1.0, 1.0)), [7, 8, 8, 7]);
        // The head is as much as four layers: the last stage has it alone.
        assert_eq!(counts(12, 4, &even(0.0, 4.0)), [4, 4, 4, 0]);
        assert_eq!(counts(65_000, 1000, &even(0.5, 2.5)).iter().max(), Some(&66));
        assert!(error(3, 4, &even(0.0, 0.0)).contains("take at most 3 stages"));
        assert!(error(3, 4, &even(f64::NAN, 0.0)).contains("embedding costs NaN"));
        assert_eq!(counts(2, 4, &even(1.0, 1.0)), [0, 1, 1, 0]);
        assert!(error(2, 5, &even(1.0, 1.0)).contains("stage 1 of 5 would hold nothing"));
        assert!(error(0, 4, &even(0.0, 0.0)).contains("at least one of each"));
        assert!(error(usize::MAX, 4, &even(0.0, 0.0)).contains("at most"));
    }

    #[test]
    fn by_counts() {
        assert_eq!(counts(14, 4, &LayerSplit::Counts(vec![3, 4, 4, 3])), [3, 4, 4, 3]);
        assert_eq!(counts(4, 3, &LayerSplit::Counts(vec![0, 4, 0])), [0, 4, 0]);
        assert!(error(14, 4, &LayerSplit::Counts(vec![3, 4, 4, 4])).contains("hold 15 layers, the model has 14"));
        assert!(error(14, 4, &LayerSplit::Counts(vec![7, 7])).contains("for 2 stages, and there are 4"));
        assert!(error(8, 4, &LayerSplit::Counts(vec![4, 0, 4, 0])).contains("stage 1 of 4 would hold nothing"));
        assert!(error(8, 2, &LayerSplit::Counts(vec![usize::MAX, 9])).contains("the model has 8"));
    }

    #[test]
    fn by_layout() {
        assert_eq!(counts(14, 4, &layout("Et*3|t*4|t*4|t*3L")), [3, 4, 4, 3]);
        assert_eq!(counts(8, 5, &layout("E|t*3|t*4|t|L")), [0, 3, 4, 1, 0]);
        // DeepSeek-V3 in Megatron-LM's documentation, without its last layer but one.
        let deepseek = counts(61, 31, &layout("Et*3|(tt|)*29,L"));
        assert_eq!((deepseek[0], deepseek[1], deepseek[29], deepseek[30]), (3, 2, 2, 0));
        assert_eq!(counts(6, 3, &layout(" E tt | (t)*2, | t t L")), [2, 2, 2]);
        assert_eq!(counts(13, 7, &layout("E((t*2|)*2 tt|)*2 tL")), [2, 2, 2, 2, 2, 2, 1]);
    }

    #[test]
    fn layouts_that_cannot_be_point_at_the_column() {
        let column = |n, stages, text: &str, column: usize, words: &str| {
            let e = error(n, stages, &layout(text));
            assert!(e.contains(&format!("column {column}:")) && e.contains(words), "{text}: {e}");
        };
        column(4, 2, "Ett|ttx|L", 7, "\"x\"");
        column(4, 2, "tt|ttL", 1, "begins with E");
        column(4, 2, "", 1, "begins with E");
        column(4, 2, "Ett|tt", 6, "ends with L");
        column(4, 2, "Ett|EttL", 5, "at the very beginning");
        column(4, 2, "EttL|ttL", 4, "at the very end");
        column(4, 3, "Ett||ttL", 5, "stage 1 is empty");
        column(4, 3, "Ett|ttL", 7, "2 stages, and there are 3");
        column(5, 2, "Ett|ttL", 7, "4 layers, and the model has 5");
        column(4, 2, "Et*|ttL", 4, "number");
        column(4, 2, "Et*0|ttL", 4, "at least 1");
        column(4, 2, "*3", 1, "repeats");
        column(4, 2, "E(tt|ttL", 2, "never closed");
        column(4, 2, "Ett)|ttL", 4, "without its (");
        column(4, 2, "Ett|()*2ttL", 6, "nothing between");
        column(4, 2, "Ett|ttmL", 7, "multi-token");
        column(4, 2, "Et*99999999999999999999|L", 4, "at most");
        column(4, 2, "E((t*9999)*9999)*9999|L", 12, "at most");
        column(4, 2, "Eé|L", 2, "\"é\"");
        column(4, 2, &format!("E{}", "(".repeat(100_000)), 34, "deep");
    }
}
