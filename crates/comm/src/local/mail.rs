//! Messages from one rank to one other.
//!
//! Both sides post: the sender what is to be read, the receiver where it goes. Whoever comes second copies, so there is one copy
//! and no thread in between. Messages of a pair of ranks meet in the order in which they were posted.
//!
//! A posted slice belongs to a rank that is waiting; it may take its post back (time-out, failure) only while nobody has taken
//! it up, under the lock under which it is taken up. A posted tensor belongs to the post and lives as long.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use phalanx_tensor::Tensor;

use super::group::LocalGroup;
use super::shared::Lent;
use super::world::lock;
use crate::backend::{InFlight, Spent};
use crate::bytes;
use crate::call::{Aspect, Call};
use crate::error::{CommError, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// In the queue.
    Posted,
    /// Its mate is copying.
    Taken,
    /// Copied, or found not to fit (the world has failed then).
    Done,
}

struct Progress {
    stage: Stage,
    moving: Duration,
    tensor: Option<Tensor>,
    unfit: bool,
}

/// One side of a message.
pub(super) struct Post {
    call: Arc<Call>,
    rank: usize,
    peer: usize,
    sends: bool,
    lent: Lent,
    progress: Mutex<Progress>,
    done: Condvar,
}

impl Post {
    fn finish(&self, moving: Duration, unfit: bool) {
        let mut progress = lock(&self.progress);
        progress.stage = Stage::Done;
        progress.moving = moving;
        progress.unfit = unfit;
        self.done.notify_all();
    }

    fn wake(&self) {
        drop(lock(&self.progress));
        self.done.notify_all();
    }
}

/// Messages for one rank that wait for their other side.
#[derive(Default)]
pub(super) struct Inbox {
    /// By sender and side (sends: true); of the two sides of a pair at most one waits.
    queues: Mutex<Queues>,
}

type Queues = BTreeMap<(usize, bool), VecDeque<Arc<Post>>>;

impl Inbox {
    pub(super) fn wake_all(&self) {
        let posts: Vec<Arc<Post>> = lock(&self.queues).values().flatten().cloned().collect();
        posts.iter().for_each(|p| p.wake());
    }
}

impl LocalGroup {
    /// The inbox that a post of either side goes to, and its queue there.
    fn queue(&self, post: &Post, sends: bool) -> (&Inbox, (usize, bool)) {
        let (from, to) = if post.sends { (post.rank, post.peer) } else { (post.peer, post.rank) };
        (&self.inboxes[to], (from, sends))
    }

    fn post(
        &self,
        rank: usize,
        call: Call,
        peer: usize,
        lent: Lent,
        tensor: Option<Tensor>,
        sends: bool,
    ) -> Result<Arc<Post>> {
        let call = Arc::new(call);
        let progress = Mutex::new(Progress { stage: Stage::Posted, moving: Duration::ZERO, tensor, unfit: false });
        let post = Arc::new(Post { call, rank, peer, sends, lent, progress, done: Condvar::new() });
        let (inbox, own) = self.queue(&post, sends);
        let (_, other) = self.queue(&post, !sends);
        let mate = {
            let mut queues = lock(&inbox.queues);
            if self.world.failed() {
                drop(queues);
                return Err(self.interrupted(rank, &post.call));
            }
            match queues.get_mut(&other).and_then(VecDeque::pop_front) {
                Some(mate) => {
                    lock(&mate.progress).stage = Stage::Taken;
                    mate
                }
                None => {
                    queues.entry(own).or_default().push_back(Arc::clone(&post));
                    return Ok(post);
                }
            }
        };
        let begin = Instant::now();
        let (from, to) = if sends { (&post, &mate) } else { (&mate, &post) };
        if let Some(aspect) = unfit(&from.call, &to.call) {
            let found = CommError::Mismatch {
                group: self.name.to_string(),
                aspect,
                first_rank: self.members[from.rank],
                first: from.call.to_string(),
                second_rank: self.members[to.rank],
                second: to.call.to_string(),
            };
            let error = self.found(rank, &post.call, found);
            mate.finish(Duration::ZERO, true);
            return Err(error);
        }
        // SAFETY: the mate's slice is lent until its `finish`, as it was taken up under the lock under which its owner may take
        // it back; this side's is lent by the caller of this function, or by the tensor in `post`. The sender's is only read
        // meanwhile, the receiver's used by nobody else.
        let (source, target) = unsafe { (from.lent.slice(0..from.lent.len()), to.lent.slice_mut(0..to.lent.len())) };
        phalanx_kernels::stream::copy(target, source);
        let moving = begin.elapsed();
        mate.finish(moving, false);
        post.finish(moving, false);
        Ok(post)
    }

    /// Waits until a post is done; or takes it back.
    fn finish(&self, post: &Post, begin: Instant) -> Result<Spent> {
        let world = &self.world;
        let deadline = begin + world.options.timeout;
        world.enter(self.members[post.rank], &self.name, &post.call);
        if post.call.eager {
            self.look_out(true, || lock(&post.progress).stage == Stage::Done || world.failed());
        }
        let outcome = loop {
            let progress = lock(&post.progress);
            match progress.stage {
                Stage::Done if progress.unfit => break Err(None),
                Stage::Done => break Ok(progress.moving),
                Stage::Taken => {
                    // A copy is under way and ends by itself.
                    drop(post.done.wait(progress));
                    continue;
                }
                Stage::Posted => {}
            }
            let now = Instant::now();
            let trouble = if world.failed() {
                Some(None)
            } else if self.is_gone(post.peer) {
                Some(Some(self.rank_left(post.peer, post.rank, &post.call)))
            } else if now >= deadline {
                Some(Some(self.timeout(post.rank, &post.call, std::iter::once(post.peer))))
            } else {
                None
            };
            match trouble {
                None => drop(post.done.wait_timeout(progress, deadline - now)),
                Some(found) => {
                    drop(progress);
                    if self.take_back(post) {
                        break Err(found);
                    }
                }
            }
        };
        world.leave(self.members[post.rank], &post.call);
        match outcome {
            Ok(moving) => Ok(Spent { waiting: begin.elapsed().saturating_sub(moving), moving }),
            Err(Some(found)) => Err(self.found(post.rank, &post.call, found)),
            Err(None) => Err(self.failure_of(post)),
        }
    }

    /// What a call returns whose world has failed: the failure itself if the message was the one that did not fit.
    fn failure_of(&self, post: &Post) -> CommError {
        match self.world.failure() {
            Some(failure @ CommError::Mismatch { .. }) if lock(&post.progress).unfit => failure,
            _ => self.interrupted(post.rank, &post.call),
        }
    }

    /// Takes a post out of its queue; false if its mate has taken it up.
    fn take_back(&self, post: &Post) -> bool {
        let (inbox, own) = self.queue(post, post.sends);
        let mut queues = lock(&inbox.queues);
        let Some(queue) = queues.get_mut(&own) else { return false };
        let Some(place) = queue.iter().position(|p| std::ptr::eq(&**p, post)) else { return false };
        queue.remove(place);
        true
    }

    /// Sends and receives slices: posts all, then waits for all. On every path each slice is back when it returns.
    pub(super) fn exchange(
        &self,
        rank: usize,
        send: Option<(Call, usize, &[u8])>,
        recv: Option<(Call, usize, &mut [u8])>,
    ) -> Result<(Spent, Spent)> {
        /// Waits out what is not done when the function ends early; the world has failed then, so it is taken back at once.
        struct Lending<'a>(&'a LocalGroup, Option<Arc<Post>>, Instant);
        impl Lending<'_> {
            fn finish(mut self) -> Result<Spent> {
                self.1.take().map_or(Ok(Spent::default()), |post| self.0.finish(&post, self.2))
            }
        }
        impl Drop for Lending<'_> {
            fn drop(&mut self) {
                if let Some(post) = self.1.take() {
                    let _ = self.0.finish(&post, self.2);
                }
            }
        }
        let begin = Instant::now();
        let send = match send {
            Some((call, to, data)) => Some(self.post(rank, call, to, Lent::read(data), None, true)?),
            None => None,
        };
        let send = Lending(self, send, begin);
        let recv = match recv {
            Some((call, from, data)) => Some(self.post(rank, call, from, Lent::write(data), None, false)?),
            None => None,
        };
        let recv = Lending(self, recv, begin);
        let received = recv.finish()?;
        Ok((send.finish()?, received))
    }

    /// Posts a tensor to be sent or filled.
    pub(super) fn post_tensor(
        self: &Arc<LocalGroup>,
        rank: usize,
        call: Call,
        peer: usize,
        mut tensor: Tensor,
        sends: bool,
    ) -> Result<Box<dyn InFlight>> {
        let lent = if sends {
            bytes::of_tensor(&tensor).map(Lent::read)
        } else {
            bytes::of_tensor_mut(&mut tensor).map(Lent::write)
        };
        let lent = lent.map_err(|e| CommError::Argument {
            rank: self.members[rank],
            group: self.name.to_string(),
            call: call.to_string(),
            what: e.to_string(),
            mend: "give a tensor whose memory nobody else holds".into(),
        })?;
        let post = self.post(rank, call, peer, lent, Some(tensor), sends)?;
        Ok(Box::new(Posted { group: Arc::clone(self), post }))
    }
}

/// In what the two sides of a message differ.
fn unfit(send: &Call, recv: &Call) -> Option<Aspect> {
    if send.dtype != recv.dtype {
        Some(Aspect::ElementType)
    } else if send.counts != recv.counts {
        Some(Aspect::Counts)
    } else {
        None
    }
}

/// A tensor on its way.
struct Posted {
    group: Arc<LocalGroup>,
    post: Arc<Post>,
}

impl InFlight for Posted {
    fn is_done(&self) -> bool {
        lock(&self.post.progress).stage == Stage::Done || self.group.world.failed()
    }

    fn wait(self: Box<Self>) -> Result<(Tensor, Spent)> {
        let spent = self.group.finish(&self.post, Instant::now())?;
        let tensor = lock(&self.post.progress).tensor.take();
        Ok((tensor.expect("a posted tensor is taken once, here"), spent))
    }
}
