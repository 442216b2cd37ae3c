//! Output that is one of a closed set of texts: a walk through a trie of the choices' canonical
//! tokens.
//!
//! The *edges* from a node are its children and, where a choice ends there, the end of the
//! sequence. A single edge is followed without a forward pass, so labels whose first tokens differ
//! cost one forward pass per row.
//!
//! - **Probabilities.** At a node with several edges, each edge's probability is the softmax of the
//!   raw logits (before penalties and temperature) over these edges alone. The end's weight is the
//!   sum over all end-of-sequence tokens. A choice's probability is the product along its path, so
//!   all choices sum to 1. Nodes off the chosen path are evaluated as forks of the prompt's
//!   sequence.
//! - **The answer** is sampled at each node like any token, among the node's edges. Penalties count
//!   prompt and path, so a label whose tokens occur in the prompt is penalized for them (as in
//!   vLLM). With temperature 0 *and* probabilities, the answer is the most probable choice (the
//!   first of equally probable choices). Penalties do not affect this answer, and it may differ
//!   from the choice that greedy steps lead to.
//! - **Log probabilities** of sampled tokens are raw, as everywhere. The log probability of a token
//!   that was a single edge is 0.
//! - Some tokenizers put a space in front of a text (SentencePiece's `▁`). They tokenize a choice
//!   with that space, as the model has learned to begin an answer. The returned text is the choice
//!   as requested, without the space.
//! - Stop texts, stop tokens and `ignore_eos` have no effect; `max_tokens` truncates.
//!
//! See docs/decisions/047-a-choice-is-a-walk-through-a-trie.md.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::draw::{Allowed, Draw, DrawnToken};
use crate::engine::constraint::{ConstraintError, MemoryCharge};
use crate::tokenizer::Tokenizer;

/// Maximum number of choices, and maximum bytes of all their texts.
const CHOICES_MAX: usize = 10_000;
const CHOICE_BYTES_MAX: usize = 1 << 20;

/// Index of a node in the trie; 0 is the root.
pub type NodeId = u32;

/// The trie.
#[derive(Debug)]
pub struct ChoiceTrie {
    texts: Vec<String>,
    /// Canonical tokens of each choice.
    paths: Vec<Vec<u32>>,
    /// For each choice, the nodes on its path, each with the index of the edge that the path
    /// follows: one entry per token, then one for the end.
    path_edges: Vec<Vec<(NodeId, u32)>>,
    /// See [`ChoiceTrie::deepest_branching`].
    deepest: usize,
    nodes: Vec<TrieNode>,
    eos: Vec<u32>,
    /// The trie's memory, counted among the compiled shapes. Zero unless a
    /// [`Compiler`](crate::engine::constraint::Compiler) built the trie.
    pub charge: MemoryCharge,
}

#[derive(Debug, Default)]
struct TrieNode {
    /// Child nodes by token, in the order in which choices added them.
    children: Vec<(u32, NodeId)>,
    /// The choice that ends here.
    end_choice: Option<usize>,
    /// Number of tokens from the root to this node.
    depth: usize,
    /// A choice whose path leads through or to this node.
    example_choice: usize,
    /// Ids that may be drawn, if the node has several edges: the children's tokens, then, if a
    /// choice ends here, the end-of-sequence ids that are not among the children's tokens.
    allowed_ids: Vec<u32>,
}

/// The next node with several edges or no child, and the forced tokens up to that node.
#[derive(Debug, PartialEq, Eq)]
pub struct ForcedPath {
    /// Tokens up to `node`.
    pub forced: Vec<u32>,
    pub node: NodeId,
    /// The choice that ends at `node`, if `node` has no children.
    pub ended_choice: Option<usize>,
}

impl ChoiceTrie {
    /// Builds the trie. If choices are repeated, only the first of them can be the answer.
    pub fn new(texts: &[String], tokenizer: &Tokenizer, eos: &[u32]) -> Result<ChoiceTrie, ConstraintError> {
        let bytes: usize = texts.iter().map(String::len).sum();
        if texts.is_empty() || texts.len() > CHOICES_MAX || bytes > CHOICE_BYTES_MAX {
            return Err(ConstraintError::ChoiceCount {
                count: texts.len(),
                bytes,
            });
        }
        let mut speller = Speller::new(tokenizer);
        let paths: Result<Vec<_>, _> = texts.iter().map(|t| speller.tokenize(t)).collect();
        let mut choices = ChoiceTrie {
            texts: texts.to_vec(),
            paths: paths?,
            path_edges: Vec::with_capacity(texts.len()),
            deepest: 0,
            nodes: vec![TrieNode::default()],
            eos: eos.to_vec(),
            charge: MemoryCharge::default(),
        };
        let mut edges = HashMap::new();
        for choice in 0..texts.len() {
            choices.insert(choice, &mut edges);
        }
        // The number of children is known now: the end is the edge after all children.
        for (node, edge) in choices.path_edges.iter_mut().filter_map(|edges| edges.last_mut()) {
            *edge = choices.nodes[*node as usize].children.len() as u32;
        }
        for node in choices.nodes.iter_mut().filter(|node| node.edge_count() > 1) {
            node.allowed_ids = node.children.iter().map(|(token, _)| *token).collect();
            if node.end_choice.is_some() {
                let children = &node.children;
                let ends = eos.iter().filter(|id| children.iter().all(|(token, _)| token != *id));
                node.allowed_ids.extend(ends);
            }
        }
        let deepest = choices
            .nodes
            .iter()
            .filter(|n| n.edge_count() > 1)
            .map(|n| n.depth)
            .max();
        choices.deepest = deepest.unwrap_or(0);
        match choices
            .nodes
            .iter()
            .find(|n| n.end_choice.is_some() && !n.children.is_empty())
        {
            Some(node) if eos.is_empty() => Err(ConstraintError::NoEnd {
                text: texts[node.example_choice].clone(),
            }),
            _ => Ok(choices),
        }
    }

    /// Adds a choice's path. `edges` maps a node and a token to the child's index.
    fn insert(&mut self, choice: usize, edges: &mut HashMap<(NodeId, u32), u32>) {
        let mut node: NodeId = 0;
        let mut path_edges = Vec::with_capacity(self.paths[choice].len() + 1);
        for (i, &token) in self.paths[choice].iter().enumerate() {
            let edge = *edges.entry((node, token)).or_insert_with(|| {
                let child = self.nodes.len() as NodeId;
                self.nodes.push(TrieNode {
                    depth: i + 1,
                    example_choice: choice,
                    ..TrieNode::default()
                });
                let children = &mut self.nodes[node as usize].children;
                children.push((token, child));
                children.len() as u32 - 1
            });
            path_edges.push((node, edge));
            node = self.nodes[node as usize].children[edge as usize].1;
        }
        path_edges.push((node, 0));
        self.path_edges.push(path_edges);
        let end = &mut self.nodes[node as usize];
        if end.end_choice.is_none() {
            end.end_choice = Some(choice);
            end.example_choice = choice;
        }
    }

    /// Whether an earlier choice has the same tokens.
    fn is_repeated(&self, choice: usize) -> bool {
        let end = self.path_edges[choice]
            .last()
            .map(|(node, _)| &self.nodes[*node as usize]);
        end.is_some_and(|node| node.end_choice != Some(choice))
    }

    /// Each choice's text, with its tokens.
    pub fn texts_and_tokens(&self) -> impl Iterator<Item = (&str, &[u32])> {
        self.texts
            .iter()
            .map(String::as_str)
            .zip(self.paths.iter().map(Vec::as_slice))
    }

    /// Maximum tokens to compute after the prompt: the depth of the deepest node with several
    /// edges.
    pub fn deepest_branching(&self) -> usize {
        self.deepest
    }

    /// Number of tokens of the longest choice.
    pub fn longest_tokens(&self) -> usize {
        self.paths.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Number of tokens from the root to `node`.
    pub fn depth(&self, node: NodeId) -> usize {
        self.nodes[node as usize].depth
    }

    /// Follows the edges from `node` while there is only one edge.
    pub fn follow_forced(&self, mut node: NodeId) -> ForcedPath {
        let mut forced = Vec::new();
        loop {
            let current = &self.nodes[node as usize];
            match (&current.children[..], current.end_choice) {
                ([(token, child)], None) => {
                    forced.push(*token);
                    node = *child;
                }
                ([], ended_choice) => {
                    return ForcedPath {
                        forced,
                        node,
                        ended_choice,
                    };
                }
                _ => {
                    return ForcedPath {
                        forced,
                        node,
                        ended_choice: None,
                    };
                }
            }
        }
    }

    /// Tokens from the root to `node`.
    pub fn path_to(&self, node: NodeId) -> &[u32] {
        let node = &self.nodes[node as usize];
        &self.paths[node.example_choice][..node.depth]
    }

    /// Log probability of each edge from `node`, children first, then the end if a choice ends
    /// there. `logits` are those of the node's `allowed_ids`, in that order.
    fn edge_log_probabilities(&self, node: NodeId, logits: &[f32]) -> Vec<f64> {
        let node = &self.nodes[node as usize];
        let logit = |index: usize| logits.get(index).map_or(f64::NEG_INFINITY, |l| f64::from(*l));
        let mut edges: Vec<f64> = (0..node.children.len()).map(logit).collect();
        if node.end_choice.is_some() {
            let ends = self
                .eos
                .iter()
                .filter_map(|id| node.allowed_ids.iter().position(|allowed| allowed == id));
            edges.push(log_sum_exp(ends.map(logit)));
        }
        let total = log_sum_exp(edges.iter().copied());
        edges.iter().map(|edge| edge - total).collect()
    }
}

impl TrieNode {
    fn edge_count(&self) -> usize {
        self.children.len() + usize::from(self.end_choice.is_some())
    }
}

/// Natural logarithm of the sum of exponentials.
fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + values.map(|v| (v - max).exp()).sum::<f64>().ln()
}

/// Tokenizes choices.
struct Speller<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids by their bytes, and the byte length of the longest token. Built at the first choice that
    /// the tokenizer would change.
    vocabulary: Option<(HashMap<&'a [u8], u32>, usize)>,
}

impl<'a> Speller<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Speller<'a> {
        Speller {
            tokenizer,
            vocabulary: None,
        }
    }

    /// The tokens of a choice. Where the tokenizer puts a space in front of a text, the tokens
    /// begin with that space if the vocabulary can spell it.
    fn tokenize(&mut self, text: &str) -> Result<Vec<u32>, ConstraintError> {
        let prefixed = if self.tokenizer.prefixes_space() && !text.is_empty() {
            self.spell(&format!(" {text}"))
        } else {
            None
        };
        prefixed
            .or_else(|| self.spell(text))
            .ok_or_else(|| ConstraintError::NotInVocabulary { text: text.to_string() })
    }

    /// The tokenizer's own tokens. If they spell another text (a normalizer may change it), the
    /// longest matching tokens from left to right.
    fn spell(&mut self, text: &str) -> Option<Vec<u32>> {
        let tokenizer = self.tokenizer;
        let tokens = tokenizer.encode_plain(text);
        let spelled = tokens.iter().flat_map(|t| tokenizer.token_bytes(*t)).copied();
        if spelled.eq(text.bytes()) && tokens.iter().all(|t| !tokenizer.is_special(*t)) {
            return Some(tokens);
        }
        let (vocabulary, longest) = self.vocabulary.get_or_insert_with(|| {
            let ids = (0..tokenizer.vocab_size() as u32)
                .rev()
                .filter(|id| !tokenizer.is_special(*id));
            let by_bytes: HashMap<&[u8], u32> = ids
                .map(|id| (tokenizer.token_bytes(id), id))
                .filter(|(bytes, _)| !bytes.is_empty())
                .collect();
            let longest = by_bytes.keys().map(|bytes| bytes.len()).max().unwrap_or(0);
            (by_bytes, longest)
        });
        let mut rest = text.as_bytes();
        let mut tokens = Vec::new();
        while !rest.is_empty() {
            let (n, token) = (1..=rest.len().min(*longest))
                .rev()
                .find_map(|n| Some((n, *vocabulary.get(&rest[..n])?)))?;
            tokens.push(token);
            rest = &rest[n..];
        }
        Some(tokens)
    }
}

/// The model's answer at one node.
#[derive(Debug)]
struct NodeAnswer {
    /// Log probability of each edge under the constraint; empty unless probabilities are requested.
    edge_log_probabilities: Vec<f64>,
    /// Raw log probability of each child; empty unless log probabilities are requested.
    child_logprobs: Vec<f32>,
    /// Index of the sampled edge.
    sampled_edge: usize,
}

/// The choice of one completion, node by node.
#[derive(Debug)]
pub struct ChoiceState {
    choices: Arc<ChoiceTrie>,
    wants_probabilities: bool,
    answers: HashMap<NodeId, NodeAnswer>,
    /// Number of nodes that sequences are still computing.
    pending_nodes: usize,
}

/// The chosen choice.
#[derive(Debug)]
pub struct ChoiceResult {
    pub text: String,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub probabilities: Option<Vec<f32>>,
}

impl ChoiceState {
    /// Starts at the root, with one sequence to compute.
    pub fn new(choices: Arc<ChoiceTrie>, wants_probabilities: bool) -> ChoiceState {
        ChoiceState {
            choices,
            wants_probabilities,
            answers: HashMap::new(),
            pending_nodes: 1,
        }
    }

    pub fn choices(&self) -> &ChoiceTrie {
        &self.choices
    }

    /// How to draw at `node`; all other settings are those of `draw`.
    pub fn draw<'a>(&'a self, node: NodeId, draw: Draw<'a>) -> Draw<'a> {
        Draw {
            allowed: Allowed::Ids(&self.choices.nodes[node as usize].allowed_ids),
            completion: self.choices.path_to(node),
            wants_logits: self.wants_probabilities || draw.wants_log_sum_exp,
            ..draw
        }
    }

    /// Appends the ids that an answer may begin with: the forced first id, or all ids of the root.
    pub fn first_ids(&self, ids: &mut Vec<u32>) {
        match self.choices.follow_forced(0).forced.first() {
            Some(first) => ids.push(*first),
            None => ids.extend(&self.choices.nodes[0].allowed_ids),
        }
    }

    /// Processes the answer's first token if the choices allow only one. Returns `false`, without
    /// any change, if they allow several.
    pub fn consume_forced_first(&mut self, drawn: &DrawnToken, logprobs: bool) -> bool {
        let is_forced = !self.choices.follow_forced(0).forced.is_empty();
        if is_forced {
            let child_logprobs = if logprobs {
                vec![drawn.log_probability()]
            } else {
                Vec::new()
            };
            let answer = NodeAnswer {
                edge_log_probabilities: if self.wants_probabilities {
                    vec![0.0]
                } else {
                    Vec::new()
                },
                child_logprobs,
                sampled_edge: 0,
            };
            self.answers.insert(0, answer);
        }
        is_forced
    }

    /// Processes the token drawn at `node`; with `logprobs`, keeps log probabilities. Returns the
    /// nodes that must be computed next, each with the tokens from `node` to it. For the end of the
    /// walk, see [`ChoiceState::is_decided`].
    pub fn consume(&mut self, node: NodeId, drawn: &DrawnToken, logprobs: bool) -> Vec<(NodeId, Vec<u32>)> {
        let choices = &self.choices;
        let children = &choices.nodes[node as usize].children;
        let sampled_edge = children
            .iter()
            .position(|(t, _)| *t == drawn.token)
            .unwrap_or(children.len());
        let edge_log_probabilities = if self.wants_probabilities {
            choices.edge_log_probabilities(node, &drawn.logits)
        } else {
            Vec::new()
        };
        let child_logits = drawn.logits.iter().take(children.len());
        let child_logprobs = if logprobs {
            child_logits.map(|logit| drawn.log_probability_of(*logit)).collect()
        } else {
            Vec::new()
        };
        let answer = NodeAnswer {
            edge_log_probabilities,
            child_logprobs,
            sampled_edge,
        };
        self.answers.insert(node, answer);
        let mut next = Vec::new();
        for (edge, (token, child)) in children.iter().enumerate() {
            let walk = choices.follow_forced(*child);
            if walk.ended_choice.is_none() && (self.wants_probabilities || edge == sampled_edge) {
                let tokens = std::iter::once(*token).chain(walk.forced).collect();
                next.push((walk.node, tokens));
            }
        }
        self.pending_nodes = self.pending_nodes + next.len() - 1;
        next
    }

    /// Whether no node is left to compute.
    pub fn is_decided(&self) -> bool {
        self.pending_nodes == 0
    }

    /// The chosen choice, once no node is left to compute (or if there is only one choice).
    pub fn chosen(&self, is_greedy: bool) -> ChoiceResult {
        let probabilities = self.wants_probabilities.then(|| self.probabilities());
        let choice = match &probabilities {
            Some(p) if is_greedy => (0..p.len()).rev().max_by(|a, b| p[*a].total_cmp(&p[*b])).unwrap_or(0),
            _ => self.sampled_choice(),
        };
        let tokens = self.choices.paths[choice].clone();
        let logprobs = self
            .answers_along(choice)
            .map(|(answer, edge)| answer.map_or(0.0, |a| a.child_logprobs.get(edge).copied().unwrap_or(0.0)));
        ChoiceResult {
            text: self.choices.texts[choice].clone(),
            logprobs: logprobs.take(tokens.len()).collect(),
            tokens,
            probabilities: probabilities.map(|p| p.iter().map(|p| *p as f32).collect()),
        }
    }

    /// The choice that the sampled edges lead to.
    fn sampled_choice(&self) -> usize {
        let mut node = 0;
        loop {
            let walk = self.choices.follow_forced(node);
            let reached = &self.choices.nodes[walk.node as usize];
            let answer = self.answers.get(&walk.node);
            let sampled_edge = answer.map_or(reached.children.len(), |answer| answer.sampled_edge);
            match (walk.ended_choice, reached.children.get(sampled_edge)) {
                (None, Some((_, child))) => node = *child,
                (ended_choice, _) => {
                    return ended_choice.or(reached.end_choice).unwrap_or(reached.example_choice);
                }
            }
        }
    }

    /// The model's answer at each node of a choice's path, with the index of the path's edge: one
    /// entry per token, then one for the end.
    fn answers_along(&self, choice: usize) -> impl Iterator<Item = (Option<&NodeAnswer>, usize)> {
        let path_edges = self.choices.path_edges[choice].iter();
        path_edges.map(|(node, edge)| (self.answers.get(node), *edge as usize))
    }

    /// The probability of each choice; 0 for repetitions of an earlier choice.
    fn probabilities(&self) -> Vec<f64> {
        let probability = |choice| {
            if self.choices.is_repeated(choice) {
                return 0.0;
            }
            let edges = self
                .answers_along(choice)
                .filter_map(|(answer, edge)| answer?.edge_log_probabilities.get(edge));
            edges.sum::<f64>().exp()
        };
        (0..self.choices.paths.len()).map(probability).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::sample::{Scratch, sample};

    fn choices(texts: &[&str], words: &[&str]) -> (ChoiceTrie, Tokenizer) {
        let tokenizer = Tokenizer::from_words(words, &["<eos>"]).unwrap();
        let texts: Vec<String> = texts.iter().map(|t| t.to_string()).collect();
        let eos = [tokenizer.eos_id().unwrap()];
        (ChoiceTrie::new(&texts, &tokenizer, &eos).unwrap(), tokenizer)
    }

    #[test]
    fn forced_edges_are_followed() {
        let (c, t) = choices(&["say yes", "say no"], &["say", " yes", " no"]);
        let (yes, no) = (t.encode_plain(" yes"), t.encode_plain(" no"));
        let say = t.encode_plain("say");
        let walk = c.follow_forced(0);
        if yes.len() == 1 && no.len() == 1 {
            assert_eq!((walk.forced, walk.ended_choice), (say, None));
            assert_eq!(c.deepest_branching(), 1);
        } else {
            assert!(walk.forced.starts_with(&say));
        }
    }

    #[test]
    fn a_single_choice_needs_no_step() {
        let (c, t) = choices(&["only"], &["on"]);
        let walk = c.follow_forced(0);
        assert_eq!(
            (walk.ended_choice, t.decode(&walk.forced)),
            (Some(0), "only".to_string())
        );
        let chosen = ChoiceState::new(Arc::new(c), true).chosen(true);
        assert_eq!((chosen.text.as_str(), chosen.probabilities), ("only", Some(vec![1.0])));
        assert_eq!(chosen.logprobs, vec![0.0; chosen.tokens.len()]);
    }

    /// The tokenizer converts everything to lower case, so its own tokens would spell another text.
    #[test]
    fn a_choice_that_the_tokenizer_would_change_is_spelled_by_longest_tokens() {
        let json = serde_json::json!({"version": "1.0", "added_tokens": [], "normalizer": {"type": "Lowercase"},
            "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "merges": [["N", "o"]], "vocab": {"N": 0, "o": 1, "No": 2, "n": 3, "!": 4}}});
        let tokenizer = Tokenizer::from_json(&json.to_string(), None).unwrap();
        let spelled = |text: &str| Speller::new(&tokenizer).tokenize(text);
        assert_eq!(spelled("no!"), Ok(vec![3, 1, 4]));
        assert_eq!(spelled("No!"), Ok(vec![2, 4]));
        assert_eq!(spelled("x"), Err(ConstraintError::NotInVocabulary { text: "x".into() }));
    }

    /// The path begins with the space that the tokenizer adds; the choice's text does not.
    #[test]
    fn choices_begin_with_the_tokenizers_space() {
        let sentencepiece = crate::tokenizer::tests::sentencepiece;
        let texts = ["ab", "ac", " ab"].map(String::from);
        for (scheme, begin) in [
            (Some("always"), " "),
            (Some("first"), " "),
            (None, " "),
            (Some("never"), ""),
        ] {
            let tokenizer = sentencepiece(scheme);
            let choices = ChoiceTrie::new(&texts, &tokenizer, &[2]).unwrap();
            for (path, text) in choices.paths.iter().zip(&texts) {
                assert_eq!(tokenizer.decode(path), format!("{begin}{text}"), "{scheme:?}");
            }
            let own = tokenizer.encode_piece("ab", true).unwrap();
            assert_eq!(choices.paths[0], own, "{scheme:?}: the tokenizer's own tokens");
            let only = Arc::new(ChoiceTrie::new(&texts[..1], &tokenizer, &[2]).unwrap());
            assert_eq!(ChoiceState::new(only, false).chosen(true).text, "ab");
        }
    }

    /// 5,000 choices over 150,000 tokens: one pass over the logits per node, whatever the number of
    /// its children.
    #[test]
    fn many_choices_are_cheap() {
        let texts: Vec<String> = (0..5000).map(|i| format!("choice {i:04}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).chain(["choice 0000"]).collect();
        let (c, _) = choices(&texts, &[]);
        assert_eq!((c.deepest_branching(), c.longest_tokens()), (10, 11));
        assert!(c.is_repeated(5000) && !c.is_repeated(0));
        let logits: Vec<f32> = (0..150_000).map(|i| (i % 7) as f32).collect();
        let mut state = ChoiceState::new(Arc::new(c), true);
        let mut nodes = vec![state.choices().follow_forced(0).node];
        while let Some(node) = nodes.pop() {
            let draw = state.draw(
                node,
                Draw {
                    wants_log_sum_exp: true,
                    ..Draw::GREEDY
                },
            );
            let drawn = sample(&logits, draw, &mut Scratch::default()).unwrap();
            nodes.extend(state.consume(node, &drawn, true).into_iter().map(|(node, _)| node));
        }
        let chosen = state.chosen(true);
        let p = chosen.probabilities.unwrap();
        assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-3 && p[5000] == 0.0);
        // `0` is byte 48 and 48 % 7 = 6, the largest logit; the three edges of equal weight are `0`
        // and `7`.
        assert_eq!(chosen.text, "choice 0000");
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let raw = (6.0 - sum.ln()) as f32;
        assert!(chosen.logprobs[7..].iter().all(|p| (p - raw).abs() < 1e-5));
        assert_eq!(chosen.logprobs.len(), 11);
        assert_eq!(chosen.logprobs[..7], [0.0; 7]);
    }

    #[test]
    fn empty_repeated_and_prefix_choices_do_not_panic() {
        let (c, _) = choices(&["a", "", "a", "ab"], &[]);
        assert_eq!(
            c.follow_forced(0).ended_choice,
            None,
            "the empty choice ends at the root"
        );
        let tokenizer = Tokenizer::from_words(&[], &["<eos>"]).unwrap();
        assert!(ChoiceTrie::new(&[], &tokenizer, &[]).is_err());
        let prefix = ["a".to_string(), "ab".to_string()];
        assert!(matches!(
            ChoiceTrie::new(&prefix, &tokenizer, &[]),
            Err(ConstraintError::NoEnd { .. })
        ));
    }
}
