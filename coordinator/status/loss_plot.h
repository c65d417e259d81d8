// The curve of a run's loss as a picture: <run.dir>/loss.svg, drawn from metrics.jsonl.
#pragma once

#include <filesystem>
#include <string>

namespace oomb::status {

/// Draws `loss` (and `eval_loss`, where lines have it) over the steps of `metrics`. A file that cannot be read or
/// written leaves the run alone: false is returned. The picture is written beside its name and renamed into place.
bool write_loss_plot(const std::filesystem::path& metrics, const std::filesystem::path& svg, const std::string& title);

}  // namespace oomb::status
