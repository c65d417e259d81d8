// Run files: any text is read or refused with InputError, and a run that is read comes back from its JSON as it was.
#include "configs/error.h"
#include "configs/run_config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace oomb;
  RunConfig config;
  try {
    config = parse_run_config(fuzz::text_of(data, size), "fuzz.yaml", "/fuzz");
  } catch (const InputError& error) {
    fuzz::require(std::string_view(error.what()).starts_with("fuzz.yaml"), "an error says where it is");
    return 0;
  }
  fuzz::require(run_config_from_json(to_json(config)) == config, "a run survives its JSON");
  return 0;
}
