M=[]
def m(name,file,frm,to,tests,at=None,services=False,explained=None):
    M.append((name,file,frm,to,[tests] if isinstance(tests,str) else tests,at,services,explained))
S="src/device/cpu/sample.rs"
SL="lib device::cpu::sample"
m("top-k keeps one more",S,"candidates.truncate(top_k);","candidates.truncate(top_k + 1);",SL)
m("min-p is half of what was asked",S,"c.weight >= draw.min_p","c.weight >= draw.min_p / 2.0",SL)
m("the frequency penalty counts once",S,"draw.frequency_penalty * run.len() as f32","draw.frequency_penalty",SL)
m("a repetition penalty twice for what stands in prompt and completion",S,"repetition && draw.prompt.binary_search(&run[0]).is_err()","repetition",SL)
m("a repetition penalty divides negative logits",S,"logit < 0.0","logit < f32::NEG_INFINITY",SL,at="let repeated = |logit: f32| match logit < 0.0 {")
m("log probabilities without the largest logit",S,"f64::from(max) + sum.ln()","sum.ln()",[SL,"all sampling::"])
m("a draw goes one token too far",S,"reached > target","reached > target + 0.02 * total",SL,at="if reached > target {\n            break;")
m("equal logits: the higher id first",S,"a.id.cmp(&b.id)","b.id.cmp(&a.id)",SL)
P="src/engine/philox.rs"
m("a retry draws the same numbers",P,"id.attempt.to_le_bytes()","0u32.to_le_bytes()","all sampling::a_retry")
m("all samples draw the same numbers",P,"id.sample.to_le_bytes()","0u32.to_le_bytes()","all sampling::each_field")
m("a number of 52 random bits",P,"(u64::from(a) << 32 | u64::from(b)) >> 11","(u64::from(a) << 32 | u64::from(b)) >> 12","lib engine::philox")
Q="src/engine/sequence.rs"
m("random numbers by the completion's position",Q,"self.prompt.len() + generated","generated","all sampling::each_field",at="self.key.uniform((self.prompt.len() + generated) as u32)")
m("top-p is not handed on",Q,"params.top_p","1.0","all sampling::each_field",at="top_p: params.top_p,")
m("the presence penalty is the frequency penalty",Q,"params.presence_penalty","params.frequency_penalty","all sampling::each_field",at="presence_penalty: params.presence_penalty,")
m("equal prompts with other ends are computed once",Q,"self.eos == request.eos","true","all engine_batching::equal_greedy",at="same_params && self.eos == request.eos")
m("`ignore_eos` has no say",Q,"(shaped || !self.params.ignore_eos)","true","all engine_batching::the_end_of_sequence")
m("a token beyond max_tokens",Q,"self.completion.len() >= self.max_tokens","self.completion.len() > self.max_tokens","all engine_batching::max_tokens",at="(self.completion.len() >= self.max_tokens)")
m("no stop token",Q,"self.params.stop_token_ids.contains(&token)","false","all generation_config::the_jobs_own_stop")
G="src/job/generate.rs"
m("the job's frequency penalty is its presence penalty",G,"self.frequency_penalty","self.presence_penalty","all sampling::each_field",at="frequency_penalty: self.frequency_penalty,")
m("the job's seed has no say",G,"self.seed.unwrap_or(seed)","seed","all sampling::each_field")
m("the job's min_p has no say",G,"self.min_p","0.0","all sampling::each_field",at="min_p: self.min_p,")
m("the checkpoint's stop texts beside a choice","src/job/sampling.rs","!texts.is_empty() && !is_choice","!texts.is_empty()","all generation_config::what_has_no_say")
m("the checkpoint's value over the job's","src/job/sampling.rs","self.source(name) == Some(source)","true","all generation_config::",at="values.filter(|(name, _)| self.source(name) == Some(source))")
m("log probabilities are logits","src/device/draw.rs","f64::from(logit) - self.log_sum","f64::from(logit)","all sampling::each_field")
F="src/engine/forbidden.rs"
m("what must not come first may",F,"self.ids.extend(&forbidden.first);","","all generation_config::tokens_that")
m("min_length leaves the prompt out",F,"prompt + completion < self.min_length as usize","completion < self.min_length as usize","all generation_config::draws_are")
m("a grammar's end is forbidden, too",F,"!eos.contains(id)","true","all generation_config::")
E="src/engine/scheduler.rs"
EB="all engine_batching::"
m("a cut prompt samples",E,"end == slot.tokens.len()","true","lib engine::scheduler",at="samples: end == slot.tokens.len(),")
m("a prompt found whole computes nothing",E,"slot.tokens.len() - 1","slot.tokens.len()","lib engine::scheduler",at="slot.tokens.len() - 1\n")
m("starting leaves running sequences no block",E,"missing + self.running.len()","missing","lib engine::scheduler")
m("shared blocks are written to",E,"self.pool.is_shared(slot.blocks[i])","false",["lib engine::scheduler",EB])
m("a guessed token's block is found",E,"end.min(known)","end","lib engine::scheduler",at="self.index(at, start, end.min(known));")
m("the oldest is preempted",E,"self.running.pop()","(if self.running.is_empty() { None } else { Some(self.running.remove(0)) })",["lib engine::scheduler",EB],at="if let Some(mut slot) = self.running.pop() {")
B="src/engine/blocks.rs"
m("a block of another prompt is taken for one's own",B,"**held == *tokens","true","lib engine::blocks")
m("the newest block is evicted",B,"self.cached.pop_first()?","self.cached.pop_last()?","lib engine::blocks")
m("a block is free while somebody holds it",B,"entry.holders > 0","false",["lib engine::blocks","lib engine::scheduler"],at="if entry.holders > 0 {\n            return;")
m("a block is indexed twice",B,"!self.index.contains_key(&key)","true",["lib engine::blocks","lib engine::scheduler",EB])
K="src/engine/packing.rs"
m("the longest row does not lead",K,"(Reverse(longest), rows.iter().min().copied())","(Reverse(longest.map(|_| 0)), rows.iter().min().copied())","lib engine::packing")
m("less than a block is a group",K,"common_prefix(window[sorted[i - 1]].prompt, window[sorted[i]].prompt) / block_tokens","common_prefix(window[sorted[i - 1]].prompt, window[sorted[i]].prompt)","lib engine::packing")
m("a row's answer does not count for its length",K,"self.prompt.len() + self.max_tokens as usize","self.prompt.len()","lib engine::packing")
# dataset, job
D="src/dataset/planner.rs"
m("a carried column takes an output column's name",D,"request.reserved.contains(name)","false",["all bad_input::","all dataset_"])
m("a prompt's column is missing and nobody says so",D,"!have.contains(name)","false",["all bad_input::"],at="for name in request.columns.iter().flatten() {\n        if !have.contains(name) {")
m("inputs of two formats are one",D,"*other != format","false",["all bad_input::","all dataset_"],at="known.find(|(_, other)| *other != format)")
# report
m("dollars divided by the price","src/report/cost.rs","seconds / 3600.0 * price","seconds / 3600.0 / price","lib report::cost")
R="src/report/summary.rs"
m("the warning of cut answers comes too early",R,"truncated * 100 > answered * TRUNCATED_MAX_PERCENT","truncated * 100 >= answered * TRUNCATED_MAX_PERCENT","lib report::summary")
m("tokens/s without prompts",R,"tokens.prompt + tokens.completion","tokens.completion",["lib report::summary","all end_to_end::"],at="rate(tokens.prompt + tokens.completion, status.seconds)")
m("cancelled rows count as not finished",R,"self.errored + self.expired + self.cancelled","self.errored + self.expired",["lib report::summary","all commands::"])
m("all rows count as failed","src/report/meter.rs","all - rows[RowStatus::Succeeded as usize]","all","lib report::meter")
m("cached tokens are prompt tokens","src/report/meter.rs","row.cached_tokens","row.prompt_tokens","lib report::meter",at="u64::from(row.cached_tokens)")
# worker
m("a budget of the last cent","src/worker/limits.rs","spent >= most","spent > most","lib worker::limits")
m("no deadline","src/worker/limits.rs","age >= most","false","lib worker::limits")
W="src/worker/in_flight.rs"
m("a recall takes a shard that another delivery stands for",W,"held.iter().all(|held| held.recalled)","true","lib worker::in_flight")
m("a second delivery begins the shard again",W,"held.len() == 1","true","lib worker::in_flight")
m("a hang is no hang","src/worker/pulse.rs","began.elapsed() <= self.step_max","true","lib worker::pulse")
m("an outage leaves the shard to others","src/worker/patience.rs","Reaction::Wait","Reaction::LeaveShard","lib worker::patience",at="LedgerError::Retryable { .. } | LedgerError::Denied { .. } => Reaction::Wait,")
m("a step's time is not split among jobs","src/worker/device.rs","time.mul_f64(*tokens as f64 / all as f64)","time",["all two_jobs","lib worker::device"])
m("a cancelled shard's rows stay","src/worker/device.rs","self.engine.cancel(job, &|row| rows.contains(&row));","","all engine_batching::")
m("a retry asks as the first generation","src/worker/device.rs","job.ledger.generation()","0","all sampling::a_retry",at="job.requests(row, prompt, params, job.ledger.generation())")
# ledger
L="src/ledger/rowset.rs"
m("a range loses its first row",L,"start.max(cut_end)","start.max(cut_end + 1)","lib ledger::rowset")
m("a set holds the row after its last",L,"row < self.ranges[after - 1].1","row <= self.ranges[after - 1].1","lib ledger::rowset")
O="src/ledger/log.rs"
m("another job's record counts",O,"record.job != self.ledger.job().job","false","all ledger::",at="if record.job != self.ledger.job().job || record.shard")
m("a row counts twice",O,"!outside.is_empty() || !twice.is_empty()","!outside.is_empty()","all ledger::")
m("rows that are covered are logged again",O,"offered.difference(&self.covered)","offered.clone()","all ledger::seeds",at="let fresh = offered.difference(&self.covered);")
X="src/ledger/exchange.rs"
m("a part is replaced though another stands",X,"stamp != *was","false","all ledger::",at="if stamp != *was {\n                return Ok(Created::Theirs(found));")
m("a reply is trusted: what stands is ours","src/ledger/store.rs","found == bytes","true","all ledger::seeds",at="match found == bytes {\n                        true => Created::Ours,")
m("the local lock is not asked",X,"found != *was","false","all ledger::",at="if found != *was {")
# queue
N="src/queue/kafka/offsets.rs"
m("what is not acknowledged is committed",N,"self.pending.first().copied().or(self.next)","self.next","lib queue::kafka::offsets")
m("a failed commit is forgotten",N,"self.again || position > self.given","position > self.given","lib queue::kafka::offsets")
m("a log made anew goes on",N,"offset >= next","true","lib queue::kafka::offsets")
T="src/queue/desk.rs"
m("nobody is ever stuck",T,"out.until <= now","false","lib queue::desk")
m("a delivery becomes that of another message",T,"out.item.message == *message && which(&out.item.token)","which(&out.item.token)","lib queue::")
m("a newer message is read as ours","src/queue/message.rs","v > u64::from(MESSAGE_VERSION)","false","lib queue::message")
m("a message of any length","src/queue/message.rs","bytes.len() > MESSAGE_BYTES_MAX","false","lib queue::message")
m("a newer message is passed on for ever","src/queue/foreign.rs","hops < HOPS_MAX","true","lib queue::foreign")
m("Kafka: a redelivery is no redelivery","src/queue/kafka/group.rs","item.deliveries += 1;","","all queue_contract::",services=True)
# CUDA
C="src/device/cuda/items.rs"
m("a window that is one position short",C,"(position + 1).saturating_sub(window)","(position + 2).saturating_sub(window)","lib device::cuda::items",at="window => (position + 1).saturating_sub(window) / BLOCK_TOKENS * BLOCK_TOKENS")
m("deterministic sequences share parts of pieces",C,"blocks - blocks % (PART_TOKENS / BLOCK_TOKENS)","blocks","lib device::cuda::items")
m("an item has more queries than its block",C,"queries <= self.heads.queries(self.heads.narrow_warps())","true","lib device::cuda::items")
m("sums are scaled in half of the blocks","src/device/cuda/plan.rs","(columns as u32).div_ceil(512)","(columns as u32).div_ceil(1024)",["lib device::cuda::plan","all kernel_code::"])
m("a tile's last rows are left out","src/device/cuda/plan.rs","(shape.rows as u32).div_ceil(tile.rows())","(shape.rows as u32) / tile.rows()",["lib device::cuda::plan","all kernel_code::"],at="(shape.rows as u32).div_ceil(tile.rows()),")
m("keys and values go into the first block","src/device/cuda/step.rs","(s.first_block + position / BLOCK_TOKENS) as usize","s.first_block as usize","lib device::cuda::step")
m("a drawn token is a token","src/device/cuda/step.rs","IS_DRAWN | row","row","all cuda_",at="tokens[token as usize] = IS_DRAWN | row;")
m("card: a token's penalty counts once","src/device/cuda/draw.rs","*count += 1;","*count = 1;","lib device::cuda::draw")
m("card: what the shape forbids is allowed","src/device/cuda/draw.rs","mask[id / 32] &= !(1 << (id % 32))","()","lib device::cuda::draw",at="below(holes).iter().for_each(|id| mask[id / 32] &= !(1 << (id % 32)));")
m("card: the log of the sum alone","src/device/cuda/draw.rs","f64::from(largest) + f64::from(total).ln()","f64::from(total).ln()","lib device::cuda::draw")
m("the slowest tile is kept","src/device/cuda/tuning.rs","seconds < of_tiles","seconds > of_tiles || of_tiles.is_infinite()","lib device::cuda::tuning",at="Way::Tile(tile) if seconds < of_tiles =>")
m("a refused product is asked of the library again","src/device/cuda/tuning.rs","known.settled.insert(key, best);","let _ = best;","lib device::cuda::tuning",at="let best = Best::of_kernel(best.tile);\n            known.settled.insert(key, best);")
# model
m("Gemma's norms as they are stored","src/model/from_one.rs","1.0 + x","*x","all model_reference::answers",at="(1.0 + x).to_le_bytes()")
m("Llama 3.1's long wavelengths are not stretched","src/model/rope.rs","f / *factor as f32","f","all model_reference::answers",at="if wavelength > pretrained / low_freq_factor {\n                        f / *factor as f32")
m("YaRN does not scale","src/model/rope.rs","yarn.attention_factor as f32","1.0","all model_reference::answers")
def q(s):
    return "'''"+s+"'''" if "\n" in s or "'" in s else "'"+s+"'"
out=["# One-line changes, each of which breaks gristmill in its own way: see run.py.\n"]
for n,f,a,b,t,at,sv,ex in M:
    out.append("[[mutant]]"); out.append(f"name = {q(n)}"); out.append(f"file = {q(f)}")
    if at: out.append(f"at = {q(at)}")
    out.append(f"from = {q(a)}"); out.append(f"to = {q(b)}"); out.append("tests = ["+", ".join(q(x) for x in t)+"]")
    if sv: out.append("services = true")
    if ex: out.append(f"explained = {q(ex)}")
    out.append("")
open("list.toml","w").write("\n".join(out))
print(len(M))
