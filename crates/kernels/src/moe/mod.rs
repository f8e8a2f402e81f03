//! Mixture of experts: which experts a token goes to, and moving rows to them and back.
//!
//! A layer of E experts sends each of T tokens to k of them. The T·k (token, choice) *pairs* are numbered `token·k + choice`; sorted by
//! expert (by token within one) they are the *rows* that a grouped product works on ([`crate::gemm::grouped`]).
//!
//! | step | forward | backward |
//! |---|---|---|
//! | [`route`] | logits → the k experts of each token and their weights | gradient of the weights → gradient of the logits |
//! | [`place()`] | experts of the pairs → where each pair's row lies | (whole numbers) |
//! | [`gather`] | a token's values to each of its rows | [`sum`] |
//! | [`weigh`] | each row times its pair's weight | [`weigh_backward`] |
//! | [`sum`] | the rows of a token added up, choice by choice | [`gather`] |
//!
//! A token's result depends on nothing but the token: choices are made and sums are formed in an order of its own.

mod place;
pub mod plain;
pub mod route;
mod rows;

pub use place::{Capacity, DROPPED, Drop, place};
pub use route::{Balance, Groups, Route, Scores};
pub use rows::{gather, sum, weigh, weigh_backward};
