# Everything of the worker that reads and writes files. No torch, no MPI: it builds and is tested anywhere.
add_library(oomb_io STATIC
  checkpoint/crc32c.cpp
  checkpoint/hf_weights.cpp
  checkpoint/output.cpp
  checkpoint/safetensors.cpp
  checkpoint/safetensors_writer.cpp
  checkpoint/store.cpp
  checkpoint/strict_json.cpp
  data/mapped_file.cpp
  data/path_list.cpp
  data/sequences.cpp
  data/token_files.cpp
  data/token_stream.cpp
  model/hf_config.cpp)
target_link_libraries(oomb_io PUBLIC oomb_options PRIVATE nlohmann_json::nlohmann_json)
