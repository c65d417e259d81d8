#include "configs/topology.h"

#include "configs/reader.h"

namespace oomb {

Topology parse_topology(std::string_view yaml, const std::string& name) {
  schema::Places places;
  places.document = name;
  Topology topology;
  schema::read_settings(schema::parse_yaml(yaml, name), {}, places, topology);
  if (topology.name.empty()) topology.name = std::filesystem::path(name).stem().string();
  return topology;
}

Topology load_topology(const std::filesystem::path& file) {
  return parse_topology(schema::read_settings_file(file, "topology"), file.string());
}

std::string to_json(const Topology& topology) {
  schema::Writer writer;
  schema::visit_fields(topology, writer);
  return writer.json.dump(2);
}

}  // namespace oomb
