// Parameters in and out of Hugging Face folders and checkpoints.
#pragma once

#include <functional>
#include <string>

#include "worker/checkpoint/output.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/model/parameters.h"

namespace oomb::model {

using WarnLine = std::function<void(const std::string&)>;

/// Loads weights from a folder or .safetensors file. Throws InputError naming file and tensor: missing, wrong shape, a
/// type that is no float, or values that are not finite. Reports through `warn` tensors that the model does not use.
/// Tied weights may be stored as the embedding, as lm_head or as both; two that differ are an InputError.
void load_hf_weights(Parameters& parameters, const std::string& path, const WarnLine& warn);

/// Writes config.json and the weights, in the compute dtype, as transformers loads them. A tied head is not written
/// twice.
void save_hf_folder(const Parameters& parameters, checkpoint::OutputFolder& folder);

/// Masters (where they differ from the weights) and moments, by Hugging Face names: "m.NAME", "v.NAME", "master.NAME".
/// Coded moments by the names of Parameters: "m_code.NAME" (U8, the parameter's shape), "m_scale.NAME" (F32, a block of
/// kMomentBlock elements each), and v. Loading throws InputError naming file and tensor: missing, another shape or
/// type, values that are not finite. The caller has compared the formats that file and run ask for.
void save_optimizer_state(const Parameters& parameters, checkpoint::OutputFolder& folder);
void load_optimizer_state(Parameters& parameters, const std::string& folder);

/// Bytes that the two saves write, to within file headers.
int64_t checkpoint_bytes(const Parameters& parameters);

}  // namespace oomb::model
