//! How a command ends.

use std::error::Error;
use std::process::ExitCode;

use phalanx_models::ModelError;
use phalanx_train::TrainError;

/// A command that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All well.
    Done,
    /// A check did not pass.
    Failed,
    /// A model family that is not supported.
    Unsupported,
    /// Stopped by the user, everything saved.
    Interrupted,
}

impl From<Outcome> for ExitCode {
    fn from(o: Outcome) -> ExitCode {
        ExitCode::from(match o {
            Outcome::Done => 0,
            Outcome::Failed => 1,
            Outcome::Unsupported => 3,
            Outcome::Interrupted => crate::commands::exit_code_of_signal(),
        })
    }
}

/// Any error of a command.
pub type Boxed = Box<dyn Error + Send + Sync>;
/// Result of a command.
pub type Result<T, E = Boxed> = std::result::Result<T, E>;

/// The error in one line, without saying twice what a source already says.
pub fn chain(e: &(dyn Error + 'static)) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(s) = source {
        let more = s.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = s.source();
    }
    text
}

/// The code that an error ends the program with.
pub fn exit_code(e: &(dyn Error + 'static)) -> ExitCode {
    let mut at = Some(e);
    while let Some(e) = at {
        let train = e.downcast_ref::<TrainError>().is_some_and(phalanx_train::parity::is_unsupported);
        let model = matches!(e.downcast_ref::<ModelError>(), Some(ModelError::UnknownFamily { .. }));
        if train || model {
            return Outcome::Unsupported.into();
        }
        at = e.source();
    }
    Outcome::Failed.into()
}
