// The settings of a run: defaults, every kind of mistake, overrides, the JSON round trip, the printed reference.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "configs/error.h"
#include "configs/run_config.h"
#include "configs/schema.h"

namespace oomb {
namespace {

namespace fs = std::filesystem;

const char kMinimal[] = "model: {config: m.json}\ndata: {kind: copy}\n";

RunConfig parse(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return parse_run_config(yaml, "run.yaml", "/base/configs", overrides);
}

// The error of a text, which must be one line.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}
std::string error_of(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return error_of([&] { parse(yaml, overrides); });
}
std::string set_error(const std::string& setting) { return error_of(kMinimal, {setting}); }
RunConfig with(const std::string& setting) { return parse(kMinimal, {setting}); }

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "oomb-test-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~Folder() { fs::remove_all(path); }
  fs::path write(const std::string& name, const std::string& text) const {
    std::ofstream(path / name, std::ios::binary) << text;
    return path / name;
  }
  fs::path path;
};

TEST(Config, DefaultsAndGivenValues) {
  const RunConfig config = parse(kMinimal);
  EXPECT_EQ(config.train.steps, 100);
  EXPECT_EQ(config.train.compute_dtype, ComputeDtype::kFp32);
  EXPECT_EQ(config.attention.page_tokens, 128);
  EXPECT_EQ(config.attention.budget_pages, 64);
  EXPECT_TRUE(config.pages.hbm_bytes.automatic);
  EXPECT_EQ(config.exchange, Exchange::kAuto);
  EXPECT_EQ(config.checkpoint.resume.kind, Resume::Kind::kAuto);
  EXPECT_EQ(config.model.config, "/base/configs/m.json");
  EXPECT_EQ(config.run.name, "run");
  EXPECT_EQ(config.run.dir, "/base/configs/runs/run");
  EXPECT_EQ(config.checkpoint.dir, "/base/configs/runs/run/checkpoints");

  const RunConfig given = parse(R"(
run: {name: a b, dir: ../out}
model: {path: /models/q}
data: {paths: [x/*.txt, /y], extensions: [.h, ""]}
train:
  steps: 7
  learning_rate: 1e-3
  deterministic: true
exchange: pages
checkpoint: {every: 10min, resume: old/step-5}
)");
  EXPECT_EQ(given.run.name, "a b");
  EXPECT_EQ(given.run.dir, "/base/out");
  EXPECT_EQ(given.model.path, "/models/q");
  EXPECT_EQ(given.data.paths, (std::vector<fs::path>{"/base/configs/x/*.txt", "/y"}));
  EXPECT_EQ(given.data.extensions, (std::vector<std::string>{".h", ""}));
  EXPECT_EQ(given.train.learning_rate, 1e-3);
  EXPECT_TRUE(given.train.deterministic);
  EXPECT_EQ(given.checkpoint.every, (Interval{0, 600}));
  EXPECT_EQ(given.checkpoint.resume.path, "/base/configs/old/step-5");
}

TEST(Config, SectionWithNothingUnderItIsItsDefaults) {
  EXPECT_EQ(parse(std::string(kMinimal) + "train:\n"), parse(kMinimal));
}

// --- mistakes in a file --------------------------------------------------------------------------------------------

TEST(Config, ErrorsNameFileLinePathAndWhatIsAllowed) {
  const std::string start = "model: {config: m.json}\ndata: {kind: copy}\ntrain:\n";
  const std::pair<std::string, std::string> cases[] = {
      {"  steps: zero\n", "run.yaml:4: train.steps: zero is not allowed; allowed: an integer >= 1"},
      {"  steps: 0\n", "run.yaml:4: train.steps: 0 is not allowed; allowed: an integer >= 1"},
      {"  steps: -3\n", "run.yaml:4: train.steps: -3 is not allowed; allowed: an integer >= 1"},
      {"  steps: 1.5\n", "run.yaml:4: train.steps: 1.5 is not allowed; allowed: an integer >= 1"},
      {"  steps: 99999999999999999999\n",
       "run.yaml:4: train.steps: 99999999999999999999 is not allowed; allowed: an integer >= 1"},
      {"  steps: \"5\"\n", "run.yaml:4: train.steps: the text \"5\" is not allowed; allowed: an integer >= 1"},
      {"  steps:\n", "run.yaml:4: train.steps: no value; allowed: an integer >= 1"},
      {"  steps: [1]\n", "run.yaml:4: train.steps: a list is not allowed; allowed: an integer >= 1"},
      {"  steps: {a: 1}\n", "run.yaml:4: train.steps: a map is not allowed; allowed: an integer >= 1"},
      {"  seed: 1\n  compute_dtype: fp16\n",
       "run.yaml:5: train.compute_dtype: fp16 is not allowed; allowed: fp64, fp32, bf16"},
      {"  beta1: 1\n", "run.yaml:4: train.beta1: 1 is not allowed; allowed: a number >= 0 and < 1"},
      {"  epsilon: 0\n", "run.yaml:4: train.epsilon: 0 is not allowed; allowed: a number > 0"},
      {"  learning_rate: .nan\n",
       "run.yaml:4: train.learning_rate: .nan is not allowed; allowed: a number >= 0 and <= 100"},
      {"  learning_rate: inf\n",
       "run.yaml:4: train.learning_rate: inf is not allowed; allowed: a number >= 0 and <= 100"},
      {"  learning_rate: 1e-3x\n",
       "run.yaml:4: train.learning_rate: 1e-3x is not allowed; allowed: a number >= 0 and <= 100"},
      {"  deterministic: yes\n", "run.yaml:4: train.deterministic: yes is not allowed; allowed: true, false"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(error_of(start + text), expected);
  EXPECT_EQ(error_of("model: {config: m.json}\ntrain: 5\n"),
            "run.yaml:2: train: 5 is not allowed; allowed: a map of settings");
  EXPECT_EQ(error_of("data: {paths: x}\n"),
            "run.yaml:1: data.paths: x is not allowed; allowed: a list of paths, such as [a, b]");
  EXPECT_EQ(error_of("data:\n  paths:\n    - a\n    - [b]\n"),
            "run.yaml:4: data.paths[1]: a list is not allowed; allowed: a path");
}

TEST(Config, UnknownKeysSuggestTheNearest) {
  EXPECT_TRUE(
      error_of("train:\n  step: 5\n")
          .starts_with("run.yaml:2: train.step: unknown key, did you mean train.steps?; allowed: steps, stop_after, "));
  EXPECT_TRUE(error_of("trian: {}\n")
                  .starts_with("run.yaml:1: trian: unknown key, did you mean train?; allowed: run, model, "));
  EXPECT_TRUE(error_of("chunk: 5\n").starts_with("run.yaml:1: chunk: unknown key, did you mean sequence.chunk?; "));
  EXPECT_TRUE(
      error_of("train:\n  zzzzzzzz: 5\n").starts_with("run.yaml:2: train.zzzzzzzz: unknown key; allowed: steps"));
  EXPECT_TRUE(error_of("data: {copy: {alfabet: 3}}\n")
                  .starts_with("run.yaml:1: data.copy.alfabet: unknown key, did you mean data.copy.alphabet?"));
  EXPECT_TRUE(error_of("base: &b {steps: 3}\ntrain: {<<: *b}\n").starts_with("run.yaml:1: base: unknown key"));
}

TEST(Config, DuplicateKeys) {
  EXPECT_EQ(error_of("train:\n  steps: 5\n  seed: 1\n  steps: 6\n"),
            "run.yaml:4: train.steps: duplicate key, already at run.yaml:2; allowed: each key once");
  EXPECT_EQ(error_of("train: {}\ndata: {}\ntrain: {}\n"),
            "run.yaml:3: train: duplicate key, already at run.yaml:1; allowed: each key once");
}

TEST(Config, FilesThatAreNoRunFiles) {
  const Folder folder;
  const auto load_error = [&](const fs::path& path) { return error_of([&] { load_run_config(path); }); };
  const std::string base = folder.path.string();
  EXPECT_EQ(load_error(folder.path / "none.yaml"), base + "/none.yaml: no such run file");
  EXPECT_EQ(load_error(folder.path), base + ": a folder; allowed: a YAML run file");
  EXPECT_EQ(load_error(folder.write("e.yaml", "")), base + "/e.yaml: empty; allowed: a YAML map of settings");
  EXPECT_EQ(load_error(folder.write("c.yaml", "# nothing\n")),
            base + "/c.yaml: empty; allowed: a YAML map of settings");
  EXPECT_EQ(load_error(folder.write("l.yaml", "- 1\n")),
            base + "/l.yaml: not a settings file; allowed: a YAML map of settings");
  EXPECT_EQ(load_error(folder.write("2.yaml", "a: 1\n---\nb: 2\n")),
            base + "/2.yaml: not valid YAML, or more than one document of it; allowed: one");
  EXPECT_TRUE(
      load_error(folder.write("y.yaml", "a: 1\nb: [1,\nc: }\n")).starts_with(base + "/y.yaml:3: not valid YAML ("));
  EXPECT_TRUE(
      load_error(folder.write("t.yaml", "train:\n\tsteps: 1\n")).starts_with(base + "/t.yaml:2: not valid YAML ("));
  EXPECT_EQ(load_error(folder.write("b.yaml", std::string("a\0b", 3))), base + "/b.yaml: not a text file");
  EXPECT_EQ(load_error("/dev/zero"), "/dev/zero: too large for a settings file: more than 1 MiB");
  EXPECT_TRUE(load_error(folder.write("d.yaml", "a: " + std::string(300, '['))).starts_with(base + "/d.yaml"));
  EXPECT_NE(error_of("a: &a [*a]\n"), "");  // a list that holds itself
  EXPECT_NE(error_of("a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
                     "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
                     "e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]\n"),
            "");
  const RunConfig config = load_run_config(folder.write("ok.yaml", kMinimal));
  EXPECT_EQ(config.model.config, folder.path / "m.json");  // which need not be there
}

TEST(Config, RelativeRunFileGivesAbsolutePaths) {
  const Folder folder;
  folder.write("ok.yaml", kMinimal);
  const fs::path before = fs::current_path();
  fs::current_path(folder.path);
  const RunConfig config = load_run_config("ok.yaml");
  fs::current_path(before);
  EXPECT_EQ(config.model.config, fs::canonical(folder.path) / "m.json");
}

TEST(Config, NonsenseNeverCrashes) {
  const std::string seed_text = R"(run: {name: x, dir: "q"}
model: {config: m.json}
data: {kind: copy, paths: [a, 'b'], copy: {alphabet: 7}}
train: &t
  steps: 5
  learning_rate: 1e-3
pages: {hbm_bytes: 8GiB}
checkpoint: {every: 10min}
)";
  std::mt19937 random(7);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = seed_text;
    for (int change = 0; change < 1 + round % 4; ++change) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          text.erase(at, 1 + random() % 5);
          break;
        default:
          text.insert(at, 1, ":{}[]-&*!|>'\"#%@`,\n \t"[random() % 22]);
      }
      if (text.empty()) break;
    }
    try {
      parse(text);
      ++accepted;
    } catch (const InputError& error) {
      ASSERT_EQ(std::strpbrk(error.what(), "\n\r"), nullptr) << error.what();
    }
  }
  EXPECT_GT(accepted, 100);  // the changes are small enough to leave some texts right
}

// --- overrides -----------------------------------------------------------------------------------------------------

TEST(Config, OverridesReachAnyFieldInOrder) {
  EXPECT_EQ(with("train.steps=9").train.steps, 9);
  EXPECT_EQ(parse(kMinimal, {"train.steps=9", "train.steps=10"}).train.steps, 10);
  EXPECT_EQ(with("data.copy.alphabet=5").data.copy.alphabet, 5);
  EXPECT_EQ(with("exchange=pages").exchange, Exchange::kPages);
  EXPECT_EQ(with("data.paths=[a, /b]").data.paths, (std::vector<fs::path>{"/base/configs/a", "/b"}));
  EXPECT_EQ(with("run.name=a=b").run.name, "a=b");
  EXPECT_EQ(with("run.dir=../x").run.dir, "/base/x");
  EXPECT_EQ(parse("model: {config: m.json}\ndata: {kind: copy}\ntrain: {steps: bad}\n", {"train.steps=4"}).train.steps,
            4);
}

TEST(Config, OverrideErrorsNameTheOverride) {
  EXPECT_EQ(set_error("train.steps=zero"),
            "--set train.steps=zero: train.steps: zero is not allowed; allowed: an integer >= 1");
  EXPECT_EQ(set_error("train.steps="), "--set train.steps=: train.steps: no value; allowed: an integer >= 1");
  EXPECT_TRUE(set_error("train.stepz=3")
                  .starts_with("--set train.stepz=3: train.stepz: unknown key, did you mean train.steps?"));
  EXPECT_EQ(set_error("train.steps"), "--set train.steps: not an override; allowed: section.field=value");
  EXPECT_EQ(set_error("=3"), "--set =3: not an override; allowed: section.field=value");
  EXPECT_EQ(set_error("train..steps=3"), "--set train..steps=3: not an override; allowed: section.field=value");
  EXPECT_EQ(set_error("train=3"), "--set train=3: train: 3 is not allowed; allowed: a map of settings");
  EXPECT_TRUE(set_error("train.steps.x=3").starts_with("--set train.steps.x=3: train.steps: a map is not allowed"));
  EXPECT_TRUE(set_error("run.name=,").starts_with("--set run.name=,: not valid YAML"));  // once an endless loop
  EXPECT_TRUE(set_error("data.paths=[a").starts_with("--set data.paths=[a: not valid YAML"));
  EXPECT_TRUE(
      set_error("sequence.chunk=1000").starts_with("--set sequence.chunk=1000: sequence.chunk: 1000 is no multiple"));
}

// --- values with units ---------------------------------------------------------------------------------------------

TEST(Config, ByteSizes) {
  const std::pair<const char*, std::int64_t> cases[] = {{"0", 0},
                                                        {"4096", 4096},
                                                        {"1e9", 1'000'000'000},
                                                        {"8GiB", std::int64_t{8} << 30},
                                                        {"512MiB", 512 << 20},
                                                        {"1.5 KiB", 1536},
                                                        {"2GB", 2'000'000'000},
                                                        {"9007199254740993", 9007199254740993}};
  for (const auto& [text, bytes] : cases) {
    EXPECT_EQ(with(std::string("pages.hbm_bytes=") + text).pages.hbm_bytes, ByteSize::of(bytes)) << text;
    EXPECT_EQ(with(std::string("data.max_bytes=") + text).data.max_bytes, bytes) << text;
  }
  EXPECT_TRUE(with("pages.host_bytes=auto").pages.host_bytes.automatic);
  for (const char* text : {"-1", "8Gib", "GiB", "8 8", "1e30", "nan", "8GiBx", "all"}) {
    EXPECT_TRUE(set_error(std::string("pages.hbm_bytes=") + text)
                    .ends_with("allowed: auto, or a size such as 8GiB, 512MiB, 1e9 or 0"))
        << text;
  }
  EXPECT_NE(set_error("data.max_bytes=auto"), "");
}

TEST(Config, Intervals) {
  const std::pair<const char*, Interval> cases[] = {{"0", {}},           {"25", {25, 0}},   {"90s", {0, 90}},
                                                    {"10min", {0, 600}}, {"2h", {0, 7200}}, {"0.5 h", {0, 1800}},
                                                    {"1d", {0, 86400}}};
  for (const auto& [text, interval] : cases)
    EXPECT_EQ(with(std::string("checkpoint.every=") + text).checkpoint.every, interval) << text;
  for (const char* text : {"-1", "10m", "10 minutes", "min", "1.5", "0s", "-2h", "1e400h"}) {
    EXPECT_NE(set_error(std::string("checkpoint.every=") + text), "") << text;
  }
}

TEST(Config, ResumeIsAWordOrAPath) {
  EXPECT_EQ(with("checkpoint.resume=never").checkpoint.resume.kind, Resume::Kind::kNever);
  EXPECT_EQ(with("checkpoint.resume=auto").checkpoint.resume.kind, Resume::Kind::kAuto);
  EXPECT_EQ(with("checkpoint.resume=./auto").checkpoint.resume.path, "/base/configs/auto");
}

// --- rules about several settings ----------------------------------------------------------------------------------

TEST(Config, RulesNameAllTheirSettings) {
  const std::tuple<std::vector<std::string>, std::string, std::string> cases[] = {
      {{"attention.query_tile=192"}, "attention.query_tile", "attention.page_tokens"},
      {{"attention.query_tile=2048"}, "sequence.chunk", "attention.query_tile"},
      {{"sequence.chunk=1000"}, "sequence.chunk", "attention.page_tokens"},
      {{"attention.chunk_pages=63"}, "attention.chunk_pages", "attention.budget_pages"},
      {{"attention.votes=previous_tile", "attention.chunk_pages=64"}, "attention.votes", "attention.chunk_pages"},
      {{"train.warmup_steps=101"}, "train.warmup_steps", "train.steps"},
      {{"train.master_weights=stochastic_rounding"}, "train.master_weights", "train.compute_dtype"},
      {{"train.compute_dtype=fp64", "pages.grad_dtype=fp32"}, "pages.grad_dtype", "train.compute_dtype"},
      {{"model.path=x"}, "model.path", "model.config"},
      {{"data.kind=text"}, "data.paths", "data.kind"},
      {{"data.kind=text", "data.paths=[a]", "data.holdout_fraction=0", "eval.every=2"},
       "data.holdout_fraction",
       "eval.every"},
      {{"timeouts.lost_seconds=1.5"}, "timeouts.lost_seconds", "timeouts.heartbeat_seconds"},
      {{"exchange=ring"}, "exchange", "topology.workers"},
      {{"exchange=queries"}, "exchange", "topology.workers"},
      {{"pipeline.sequences_in_flight=65"}, "pipeline.sequences_in_flight", "and <= 64"},
  };
  for (const auto& [settings, first, second] : cases) {
    const std::string error = error_of(kMinimal, settings);
    EXPECT_TRUE(error.starts_with("--set ")) << error;
    EXPECT_NE(error.find(first), std::string::npos) << error;
    EXPECT_NE(error.find(second), std::string::npos) << error;
    EXPECT_NE(error.find("allowed: "), std::string::npos) << error;
  }
  EXPECT_NE(error_of("data: {kind: copy}\n").find("model.path"), std::string::npos);
}

TEST(Config, LimitsOfTheRulesAreAllowed) {
  EXPECT_NO_THROW(with("attention.query_tile=1024"));
  EXPECT_NO_THROW(with("attention.query_tile=256"));
  EXPECT_NO_THROW(with("attention.chunk_pages=64"));
  EXPECT_NO_THROW(with("attention.votes=previous_tile"));
  EXPECT_NO_THROW(with("attention.budget_pages=0"));
  EXPECT_NO_THROW(parse(kMinimal, {"attention.sink_pages=100", "attention.recent_pages=100"}));  // cut to the budget
  EXPECT_NO_THROW(with("train.warmup_steps=100"));
  EXPECT_NO_THROW(with("sequence.length=1"));
  EXPECT_NO_THROW(with("train.stop_after=1000"));
  EXPECT_NO_THROW(parse(kMinimal, {"sequence.chunk=7", "attention.page_tokens=7"}));
}

// --- JSON ----------------------------------------------------------------------------------------------------------

// Gives every field a value that is not its default.
struct Scrambler {
  std::mt19937_64& random;
  void field(bool& value, const schema::FieldInfo&) { value = !value; }
  void field(std::int64_t& value, const schema::FieldInfo& info) {
    const double high = std::min(info.limits.high, 9e15);
    value = static_cast<std::int64_t>(info.limits.low +
                                      static_cast<double>(random() % 1000003) / 1000003 * (high - info.limits.low));
  }
  void field(double& value, const schema::FieldInfo& info) {
    const double part = static_cast<double>(random() >> 11) * 0x1p-53;  // all 53 bits
    const double low = std::max(info.limits.low, 0.0), high = std::min(info.limits.high, 1e300);
    value = low + (part == 0 ? 0.5 : part) * (high - low);
  }
  void field(std::string& value, const schema::FieldInfo&) { value = "q\"\\ \n\u00e9 " + std::to_string(random()); }
  void field(fs::path& value, const schema::FieldInfo&) { value = "/p \u00e9/" + std::to_string(random()); }
  void field(std::vector<std::string>& value, const schema::FieldInfo&) { value = {"", "8", std::to_string(random())}; }
  void field(std::vector<fs::path>& value, const schema::FieldInfo&) { value = {"/a", "/" + std::to_string(random())}; }
  void field(ByteSize& value, const schema::FieldInfo&) {
    value = ByteSize::of(static_cast<std::int64_t>(random() >> 1));
  }
  void field(Interval& value, const schema::FieldInfo&) {
    value = {0, static_cast<double>(random() >> 11) * 0x1p-40 + 1e-9};
  }
  void field(Resume& value, const schema::FieldInfo&) {
    value = {Resume::Kind::kPath, "/r/" + std::to_string(random())};
  }
  template <typename E>
  requires std::is_enum_v<E>
  void field(E& value, const schema::FieldInfo&) {
    value = EnumTable<E>::values[random() % std::size(EnumTable<E>::values)];
  }
  template <typename S>
  void section(S& object, const char*, const char*) {
    schema::visit_fields(object, *this);
  }
};

TEST(Config, JsonRoundTripIsExact) {
  const std::uint64_t seed = 20260731;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    RunConfig config;
    schema::visit_fields(config, Scrambler{random});
    // What the rules ask for.
    config.model.path.clear();
    config.sequence.chunk = config.attention.page_tokens = 3;
    config.attention.query_tile = 0;
    config.attention.chunk_pages = 0;
    config.train.warmup_steps = 0;
    config.train.master_weights = MasterWeights::kAuto;
    config.pages.grad_dtype = PageGradDtype::kAuto;
    config.timeouts.lost_seconds = 2.5 * config.timeouts.heartbeat_seconds;
    config.timeouts.heartbeat_seconds /= 10;
    config.timeouts.lost_seconds /= 10;
    config.exchange = Exchange::kPages;
    const std::string json = to_json(config);
    const RunConfig back = run_config_from_json(json);
    ASSERT_EQ(back, config) << "seed " << seed << " round " << round << "\n" << json << to_json(back);
    ASSERT_EQ(to_json(back), json);
  }
}

TEST(Config, JsonOfAResolvedRunReadsBack) {
  for (const char* setting :
       {"train.steps=3", "checkpoint.resume=never", "pages.hbm_bytes=auto", "checkpoint.every=7", "run.name=a"}) {
    const RunConfig config = with(setting);
    EXPECT_EQ(run_config_from_json(to_json(config)), config) << setting;
  }
}

TEST(Config, JsonMistakes) {
  const auto error = [](const std::string& text) { return error_of([&] { run_config_from_json(text); }); };
  EXPECT_TRUE(error("{").starts_with("resolved configuration: not valid JSON"));
  EXPECT_EQ(error("[]"), "resolved configuration: not an object of settings");
  EXPECT_TRUE(error(R"({"train": {"stepz": 1}})").starts_with("resolved configuration: train.stepz: unknown key"));
  EXPECT_TRUE(error(R"({"train": {"steps": "1"}})").starts_with("resolved configuration: train.steps: the text \"1\""));
  EXPECT_TRUE(
      error(R"({"train": {"steps": 1, "steps": 2}})").starts_with("resolved configuration: steps: duplicate key"));
  EXPECT_NE(error(std::string(100000, '[')), "");
}

// --- the table -----------------------------------------------------------------------------------------------------

template <typename E>
void check_enum() {
  std::vector<std::string> seen;
  for (E value : EnumTable<E>::values) {
    const std::string text(to_string(value));
    EXPECT_NE(text, "?");
    EXPECT_EQ(std::count(seen.begin(), seen.end(), text), 0) << text;
    seen.push_back(text);
  }
}

struct TableChecker {
  int fields = 0;
  template <typename T>
  void field(const T&, const schema::FieldInfo& info) {
    ++fields;
    EXPECT_GT(std::strlen(info.doc), 10u) << info.name;
    for (const char* c = info.name; *c != '\0'; ++c)
      EXPECT_TRUE(std::islower(*c) || std::isdigit(*c) || *c == '_') << info.name;
    if constexpr (std::is_enum_v<T>) check_enum<T>();
  }
  template <typename S>
  void section(const S& object, const char*, const char* doc) {
    EXPECT_NE(*doc, '\0');
    schema::visit_fields(object, *this);
  }
};

TEST(Config, EveryFieldIsDocumented) {
  TableChecker checker;
  schema::visit_fields(static_cast<const RunConfig&>(RunConfig{}), checker);
  EXPECT_GT(checker.fields, 50);
}

TEST(Config, ReferenceIsCurrent) {
  EXPECT_EQ(read_file(fs::path(OOMB_SOURCE_FOLDER) / "docs" / "config.md"), config_reference())
      << "print it anew: oomb config --reference > docs/config.md";
}

}  // namespace
}  // namespace oomb
