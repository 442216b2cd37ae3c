#!/usr/bin/env bash
# The fault suite in sections: `tests/faults.sh` lists them, `tests/faults.sh SECTION…` runs them, `all` for every one.
#
#   tests/faults.sh [--ci] [--again] SECTION…|all
#
# A full run is long, so it can be had in pieces, none longer than 25 minutes: a section that passed at this commit, or at one with
# the same sources, is left out (--again runs it all the same). Results lie in tests/results/SECTION.json, stamped with the commit, the seed,
# counts and seconds. With --ci: the counts of every CI, and no result files. GRISTMILL_FAULTS_SEED=N repeats a run.
# Services are started, and stopped at the end, unless GRISTMILL_TEST_SERVICES_DIR says that they run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Name, test program, test, into how many sections its counts are divided; and where it needs one, a variable of the full
# run, or --ignored for tests that no other run may stand beside.
SECTIONS="
kills-kafka               faults faults::kills::kills_over_kafka 1
kills-rabbitmq            faults faults::kills::kills_over_rabbitmq 1
pauses                    faults faults::pauses::pauses_past_the_session 1
broker-kafka-1            faults faults::brokers::kafka_dies_and_comes_back 2
broker-kafka-2            faults faults::brokers::kafka_dies_and_comes_back 2
broker-rabbitmq           faults faults::brokers::rabbitmq_dies_and_comes_back 1
membership                faults faults::membership::workers_join_and_leave 1
two-jobs                  faults faults::two_jobs::shards_of_two_jobs_go_to_a_worker_that_joins 1
two-jobs-cancel           faults faults::two_jobs::a_cancelled_job_leaves_the_device_to_the_other 1
store                     faults faults::stores::the_store_dies_and_comes_back 1
proxy-1                   faults faults::proxied::the_store_fails_in_every_way 4
proxy-2                   faults faults::proxied::the_store_fails_in_every_way 4
proxy-3                   faults faults::proxied::the_store_fails_in_every_way 4
proxy-4                   faults faults::proxied::the_store_fails_in_every_way 4
requests                  faults faults::requests::requests_stay_within_their_bound 1
lost-topic                faults faults::lost_queues::a_lost_topic_loses_nothing 1
lost-queue                faults faults::lost_queues::a_lost_queue_loses_nothing 1
poison                    faults faults::poison::poison_harms_nobody_else 1
acknowledgement-timeout   faults faults::limits::the_acknowledgement_timeout_strikes 1
memory-alarm              faults faults::limits::the_memory_alarm_blocks_publishers 1
budget                    faults faults::orders::a_budget_is_reached_and_extended 1
budget-in-the-file        faults faults::orders::a_budget_is_added_to_the_file 1
joins-a-stopping-shard    faults faults::orders::a_message_joins_a_shard_that_stops 1
extend                    faults faults::orders::a_budget_is_extended_before_it_is_reached 1
closing                   faults faults::orders::a_closing_job_is_extended 1
cancel                    faults faults::orders::a_job_is_cancelled_and_closed 1
retry                     faults faults::orders::failed_rows_are_retried 1
input-changed             faults faults::orders::an_input_changes_and_is_restored 1
sleeper                   faults faults::orders::a_worker_sleeps_through_a_retry 1
spot-aws                  faults faults::leaving::aws_takes_the_machine_away 1
spot-google               faults faults::leaving::google_takes_the_machine_away 1
sigterm                   faults faults::leaving::sigterm_in_mid_shard_says_what_it_lost 1
once-kafka                faults faults::leaving::so_many_shards_and_once_over_kafka 1
once-rabbitmq             faults faults::leaving::so_many_shards_and_once_over_rabbitmq 1
other-model               faults faults::other_models::a_worker_of_another_model_passes_shards_on 1
failpoints-kafka          faults faults::failpoints::failpoints_over_kafka 1
failpoints-rabbitmq       faults faults::failpoints::failpoints_over_rabbitmq 1
last-step                 faults faults::failpoints::the_last_step_fails 1
control-acknowledge       faults faults::controls::acknowledging_before_committing_is_found 1
control-unconditional     faults faults::controls::putting_without_the_condition_is_found 1
control-exists            faults faults::controls::taking_already_exists_for_success_is_found 1
commit-first              faults faults::controls::a_commit_without_its_part_is_made_good 1
skew-newer                faults faults::skew::newer_messages_and_records_are_left_alone 1
skew-both                 faults faults::skew::two_versions_finish_a_job_side_by_side 1
seeds-1                   all    ledger::seeds::no_seed_breaks_the_guarantee 1 GRISTMILL_SEEDS=0..25000
seeds-2                   all    ledger::seeds::no_seed_breaks_the_guarantee 1 GRISTMILL_SEEDS=25000..50000
seeds-3                   all    ledger::seeds::no_seed_breaks_the_guarantee 1 GRISTMILL_SEEDS=50000..75000
seeds-4                   all    ledger::seeds::no_seed_breaks_the_guarantee 1 GRISTMILL_SEEDS=75000..100000
create-race               all    store_s3::eight_writers_a_key_have_one_winner 1
alone-kafka-killed        all    queue_kafka::alone_kafka_killed_and_restarted 1 --ignored
alone-rabbitmq-killed     all    queue_rabbitmq::alone_rabbitmq_killed_and_restarted 1 --ignored
alone-rabbitmq-timeout    all    queue_rabbitmq::alone_rabbitmq_channel_closed_by_the_acknowledgement_timeout 1 --ignored
alone-rabbitmq-alarm      all    queue_rabbitmq::alone_rabbitmq_memory_alarm_only_delays 1 --ignored
alone-rabbitmq-heartbeats all    queue_rabbitmq::alone_rabbitmq_heartbeats_hold_while_every_core_computes 1 --ignored
"

scale=full again=""
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --ci) scale=ci ;;
        --again) again=yes ;;
        *) echo "unknown: $1"; exit 2 ;;
    esac
    shift
done
names=$(awk 'NF { print $1 }' <<<"$SECTIONS")
if [ $# = 0 ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    printf 'sections:\n%s\n' "$names"
    exit 0
fi
[ "$*" = all ] && set -- $names

[ -x .venv/bin/python ] || { echo "run tests/check.sh once: it makes .venv/ with pyarrow"; exit 1; }
export PYTHON="$PWD/.venv/bin/python"
if [ -z "${GRISTMILL_TEST_SERVICES_DIR:-}" ]; then
    services=$(mktemp -d -t gristmill-faults-XXXXXX)
    trap 'python3 tests/services/services.py down --dir "$services"' EXIT
    python3 tests/services/services.py up --dir "$services"
    eval "$(python3 tests/services/services.py env --dir "$services")"
fi

# What the tests are made of; results and notes about them are not.
same_sources() { git diff --quiet "$1" -- src tests ':!tests/results' ':!tests/README.md' ':!tests/tables.py' Cargo.toml Cargo.lock 2>/dev/null; }
commit=$(git rev-parse HEAD)
same_sources HEAD || commit="$commit with changes"
passed_already() {
    local of
    of=$(sed -n 's/^ *"commit": "\([0-9a-f]*\)",$/\1/p' "$1" 2>/dev/null)
    [ -n "$of" ] && same_sources "$of"
}
mkdir -p tests/results
failed=""
for section in "$@"; do
    read -r _ program test shares more <<<"$(awk -v name="$section" '$1 == name' <<<"$SECTIONS")"
    [ -n "${test:-}" ] || { echo "no section $section"; exit 2; }
    variable="" ignored=""
    case "$more" in
        --ignored) ignored=--ignored ;;
        ?*) [ "$scale" = ci ] || variable=$more ;;
    esac
    result="tests/results/$section.json"
    if [ "$scale" = full ] && [ -z "$again" ] && passed_already "$result"; then
        echo "== $section: passed with these sources already"
        continue
    fi
    echo "== $section"
    line=$(mktemp)
    export GRISTMILL_FAULTS=$scale GRISTMILL_FAULTS_SHARES=$shares GRISTMILL_FAULTS_RESULT=$line
    if ! env $variable cargo test --profile checked --locked --features faults --test "$program" -- \
        --test-threads=1 --exact "$test" $ignored; then
        failed="$failed $section"
        continue
    fi
    # A skipped test passes without a result.
    [ -s "$line" ] || { failed="$failed $section(skipped)"; continue; }
    [ "$scale" = ci ] && { cat "$line"; continue; }
    SECTION=$section COMMIT=$commit PYTHONPATH=benches python3 - "$line" "$result" <<'PYTHON'
import json, os, sys
from stamp import stamp

found = json.loads(open(sys.argv[1]).read().splitlines()[-1])
# The commit is the one that this script looks at to see what has passed.
said = {"section": os.environ["SECTION"]} | stamp(".") | {"commit": os.environ["COMMIT"]}
with open(sys.argv[2], "w") as target:
    target.write(json.dumps(said | found, indent=2) + "\n")
print(open(sys.argv[2]).read())
PYTHON
done
[ -z "$failed" ] || { echo "not passed:$failed"; exit 1; }
